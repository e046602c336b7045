"""Names of the release (microsoft/rStar and the verl that it uses) -> what to set here. Used by errors only.

The names are those of examples/*.sh and rstar2_agent/config in microsoft/rStar. A key is found by its longest suffix in the table.
"""

from collections.abc import Iterator, Mapping
from typing import Any

ROOTS = (
    "augmentation", "data", "actor_rollout_ref", "algorithm", "reward_model", "trainer", "critic", "ray_init",
    # Beginnings of keys as docs/coming-from-rstar.md shortens them
    "down_sampling_config", "rollout", "actor", "multi_turn", "val_kwargs", "custom_reward_function",
)  # fmt: skip
RELEASE_KEYS = {
    "down_sample_to_n": "set rl.group_size",
    "rollout.n": "set rl.method.roc.oversample, so that rl.group_size * oversample is this number",
    "do_down_sampling": "set rl.method.roc.rule: released, or none",
    "roc_error_ratio": "set rl.method.roc.rule: released, with errors in rl.method.roc.penalties",
    "roc_answer_format": "set rl.method.roc.rule: released, with format in rl.method.roc.penalties",
    "min_zero_reward_trace_num": "set rl.method.roc.min_negative",
    "min_non_zero_reward_trace_num": "set rl.method.roc.min_positive",
    "reject_equal_reward": "leave it out: groups with equal rewards are always dropped",
    "train_batch_size": "set rl.problems_per_step",
    "max_response_length": "set rl.limits.max_response_tokens, and evaluate.max_response_tokens",
    "max_prompt_length": "leave it out: the limit is 2,048 tokens",
    "filter_overlong_prompts": "leave it out: problems with a prompt of more than 2,048 tokens are left out and counted",
    "truncation": "leave it out: prompts are never truncated",
    "return_raw_chat": "leave it out",
    "train_files": "set stages.0.problems.file",
    "val_files": "set evaluate.sets",
    "model.path": "set model",
    "use_remove_padding": "leave it out: sequences are always packed",
    "use_dynamic_bsz": "leave it out: micro-batches are always filled by tokens",
    "log_prob_use_dynamic_bsz": "leave it out: micro-batches are always filled by tokens",
    "param_offload": "set parallelism.offload_params in the profile",
    "optimizer_offload": "set parallelism.offload_optimizer in the profile",
    "optim.lr": "set rl.lr",
    "lr_warmup_steps": "set rl.warmup_steps",
    "optim.weight_decay": "set rl.weight_decay",
    "grad_clip": "set rl.max_grad_norm",
    "ppo_mini_batch_size": "set rl.mini_batches, the number of mini-batches of a step",
    "ppo_max_token_len_per_gpu": "set parallelism.tokens_per_gpu in the profile, or rl.micro_batch_tokens without verl",
    "ppo_epochs": "leave it out: a rollout is used in one update",
    "use_kl_loss": "set rl.method.kl_coefficient",
    "kl_loss_coef": "set rl.method.kl_coefficient",
    "kl_loss_type": "leave it out: rl.method.kl_coefficient uses low_var_kl",
    "use_kl_in_reward": "leave it out: there is no KL term in the reward",
    "entropy_coeff": "leave it out: there is no entropy term",
    "clip_ratio_low": "set rl.method.clip_low",
    "clip_ratio_high": "set rl.method.clip_high",
    "loss_agg_mode": "set rl.method.aggregation",
    "loss_mode": "set rl.method.loss",
    "adv_estimator": "set rl.method.type",
    "norm_adv_by_std_in_grpo": "set rl.method.normalise_std",
    "enable_gradient_checkpointing": "set rl.gradient_checkpointing",
    "max_assistant_turns": "set rl.limits.max_turns, and evaluate.max_turns",
    "max_parallel_calls": "set rl.limits.max_calls_per_turn",
    "max_tool_response_length": "set rl.limits.max_tool_chars",
    "tool_response_truncate_side": "set rl.limits.tool_truncate_side",
    "tool_config_path": "set rl.tools, such as [python_released]",
    "rollout.name": "leave it out: the engines are vLLM; SGLang is not supported",
    "rollout.temperature": "set rl.temperature",
    "rollout.mode": "leave it out: set rl.schedule.lockstep, which is off by default",
    "rollout.trace": "leave it out: the run store has every rollout; the inspector shows them",
    "trace.backend": "leave it out: the run store has every rollout; the inspector shows them",
    "trace.token2text": "leave it out: the run store has texts and tokens",
    "agent.num_workers": "leave it out: the profile decides",
    "val_kwargs.n": "set evaluate.samples",
    "val_kwargs.temperature": "set evaluate.temperature",
    "val_kwargs.top_p": "set evaluate.top_p",
    "val_kwargs.do_sample": "set evaluate.temperature; 0 is greedy",
    "tensor_model_parallel_size": "set engine.tensor_parallel in the profile",
    "gpu_memory_utilization": "set engine.memory_utilization in the profile, or engine.gpu_memory_utilization without verl",
    "custom_reward_function.path": "set rl.reward, to your own module:function",
    "custom_reward_function.name": "set rl.reward, to your own module:function",
    "reward_manager": "set rl.reward, such as released",
    "total_training_steps": "set stages.0.steps",
    "total_epochs": "set stages.0.steps",
    "save_freq": "set rl.checkpoint_every",
    "test_freq": "set evaluate.every",
    "val_before_train": "leave it out: `rstar-lab run` evaluates the model before RL",
    "val_only": "run `rstar-lab evaluate`",
    "critic_warmup": "leave it out: there is no critic",
    "logger": "set log_to, or verl.trainer.logger under verl",
    "project_name": "set label",
    "experiment_name": "set name",
    "n_gpus_per_node": "set hardware.gpus_per_node in the profile",
    "nnodes": "set hardware.nodes in the profile",
    "default_local_dir": "set --runs-dir",
    "resume_mode": "leave it out: the same command resumes a run",
}


def advice(key: str) -> str | None:
    """Return what to set instead of a key of the release; None if the key is not one."""
    parts = key.lstrip("+").split(".")
    for start in range(len(parts)):
        if found := RELEASE_KEYS.get(".".join(parts[start:])):
            return found
    return None


def leaves(key: str, value: Any) -> Iterator[str]:
    """Yield the dotted keys of the values in a mapping."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(f"{key}.{name}", inner)
    else:
        yield key
