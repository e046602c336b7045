"""Words that TRL, the Trainer of Hugging Face, verl and OpenRLHF use for keys of a recipe, and the keys."""

_LR = "rl.lr, sft.lr"
_GROUP = "rl.group_size, evaluate.samples"
_TOKENS = "rl.limits.max_response_tokens, evaluate.max_response_tokens, sft.max_tokens"
_KL = "rl.method.kl_coefficient"
_STEPS = "stages.0.steps, sft.epochs"
_PROBLEMS = "stages.0.problems.file, sft.conversations, evaluate.sets"
_MICRO = "rl.micro_batch_tokens, sft.micro_batch_tokens"
_CHECKPOINT = "rl.checkpoint_every, sft.checkpoint_every"
_EVERY = "evaluate.during.every"
_CLIP = "rl.method.clip_low, rl.method.clip_high"
_LORA = "rl.lora.rank, sft.lora.rank"
_NORM = "rl.max_grad_norm, sft.grad_clip"
_WARMUP = "rl.warmup_steps, sft.warmup"
_PRECISION = "rl.precision, sft.precision, engine.dtype"

# word -> our keys, that of the word's own section first if it has one; or what to do instead, after "-"
SYNONYMS: dict[str, str] = {
    "learning_rate": _LR, "lr_rate": _LR, "lr": _LR, "actor_learning_rate": _LR, "actor_lr": _LR,
    "num_generations": _GROUP, "n": _GROUP, "k": _GROUP, "n_samples": _GROUP, "num_samples": _GROUP, "n_samples_per_prompt": _GROUP,
    "num_return_sequences": _GROUP, "rollouts": _GROUP, "rollouts_per_prompt": _GROUP, "rollouts_per_problem": _GROUP,
    "samples_per_prompt": _GROUP, "group": _GROUP,
    "batch_size": "rl.problems_per_step, sft.batch_size", "train_batch_size": "rl.problems_per_step, sft.batch_size",
    "rollout_batch_size": "rl.problems_per_step", "generation_batch_size": "rl.problems_per_step",
    "prompts_per_step": "rl.problems_per_step",
    "mini_batch_size": "rl.mini_batches", "num_mini_batches": "rl.mini_batches",
    "per_device_train_batch_size": _MICRO, "micro_batch_size": _MICRO, "micro_train_batch_size": _MICRO,
    "gradient_accumulation_steps": "- leave it out: micro-batches of rl.micro_batch_tokens are added up to a mini-batch",
    "kl": _KL, "beta": _KL, "kl_coef": _KL, "kl_coeff": _KL, "kl_beta": _KL, "init_kl_coef": _KL,
    "max_steps": _STEPS, "num_steps": _STEPS, "steps": _STEPS, "total_steps": _STEPS, "num_episodes": _STEPS, "epochs": _STEPS,
    "num_epochs": _STEPS, "num_train_epochs": _STEPS, "max_epochs": _STEPS,
    "max_tokens": _TOKENS, "max_new_tokens": _TOKENS, "max_completion_length": _TOKENS, "generate_max_len": _TOKENS,
    "max_response_tokens": _TOKENS, "response_length": _TOKENS, "max_length": _TOKENS, "max_seq_length": _TOKENS, "max_seq_len": _TOKENS,
    "max_turns": "rl.limits.max_turns, evaluate.max_turns",
    "save_steps": _CHECKPOINT, "save_every": _CHECKPOINT, "save_interval": _CHECKPOINT, "checkpoint_steps": _CHECKPOINT,
    "save_total_limit": "rl.keep_checkpoints",
    "eval_steps": _EVERY, "eval_every": _EVERY, "eval_interval": _EVERY, "every": _EVERY, "eval_strategy": _EVERY,
    "evaluation_strategy": _EVERY,
    "epsilon": _CLIP, "clip_eps": _CLIP, "clip_epsilon": _CLIP, "cliprange": _CLIP, "eps_clip": _CLIP, "clip_range": _CLIP,
    "epsilon_low": "rl.method.clip_low", "clip_low": "rl.method.clip_low",
    "epsilon_high": "rl.method.clip_high", "eps_clip_high": "rl.method.clip_high", "clip_high": "rl.method.clip_high",
    "reward_funcs": "rl.reward", "reward_fn": "rl.reward", "reward_func": "rl.reward",
    "reward_function": "rl.reward", "rewards": "rl.reward",
    "entropy_coef": "- leave it out: there is no entropy term", "ent_coef": "- leave it out: there is no entropy term",
    "dataset": _PROBLEMS, "dataset_name": _PROBLEMS, "train_dataset": _PROBLEMS, "train_data": _PROBLEMS, "prompt_data": _PROBLEMS,
    "problems": _PROBLEMS, "data": _PROBLEMS, "eval_dataset": "evaluate.sets", "val_data": "evaluate.sets", "test_data": "evaluate.sets",
    "top_p": "- leave it out: rollouts are sampled with top-p 1; evaluate.top_p is that of evaluations",
    "top_k": "- leave it out: tokens are sampled without top-k", "min_p": "- leave it out: tokens are sampled without min-p",
    "wd": "rl.weight_decay, sft.weight_decay",
    "grad_clip": _NORM, "max_grad_norm": _NORM, "clip_grad": _NORM, "gradient_clipping": _NORM, "max_norm": _NORM,
    "warmup_ratio": _WARMUP, "warmup": _WARMUP, "warmup_steps": _WARMUP, "num_warmup_steps": _WARMUP, "lr_warmup_ratio": _WARMUP,
    "lr_scheduler_type": "sft.schedule", "lr_scheduler": "sft.schedule",
    "loss_type": "rl.method.aggregation, rl.method.loss", "loss": "rl.method.loss",
    "advantage_estimator": "rl.method.type", "algorithm": "rl.method.type", "algo": "rl.method.type",
    "scale_rewards": "rl.method.normalise_std", "norm_adv": "rl.method.normalise_std",
    "num_iterations": "- leave it out: a rollout is used in one update", "inner_epochs": "- leave it out: a rollout is used in one update",
    "use_vllm": "engine.kind", "vllm_mode": "engine.kind", "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
    "tensor_parallel_size": "- set engine.tensor_parallel in the profile", "tp": "- set engine.tensor_parallel in the profile",
    "lora_r": _LORA, "lora_rank": _LORA, "use_peft": _LORA, "peft_config": _LORA, "use_lora": _LORA,
    "lora_alpha": "rl.lora.alpha, sft.lora.alpha", "lora_target_modules": "rl.lora.targets, sft.lora.targets",
    "target_modules": "rl.lora.targets, sft.lora.targets",
    "bf16": _PRECISION, "fp16": _PRECISION, "torch_dtype": _PRECISION, "dtype": _PRECISION, "mixed_precision": _PRECISION,
    "model_name_or_path": "model", "model_name": "model", "model_path": "model", "base_model": "model",
    "pretrain": "model", "policy": "model",
    "output_dir": "runs", "save_path": "runs", "ckpt_path": "runs", "logging_dir": "runs",
    "run_name": "name", "exp_name": "name", "report_to": "log_to", "use_wandb": "log_to", "wandb": "log_to",
    "logging_steps": "- leave it out: every step is logged", "random_seed": "seed",
    "mask_truncated_completions": "- add {type: overlong_filter} to rl.method.add",
    "num_workers": "sandbox.workers, engine.count", "timeout": "sandbox.timeout_s",
}  # fmt: skip


def synonym_line(key: str) -> str | None:
    """Return the line of an error about a word of another trainer; None if the last part of the key is not such a word.

    key: dotted. The keys of its own section come first: `sft.learning_rate` is `sft.lr`.
    """
    *sections, word = key.lower().replace("-", "_").split(".")
    found = SYNONYMS.get(word)
    if found is None:
        return None
    if found.startswith("- "):
        return f"{key}: unknown key; {found.removeprefix('- ')}"
    keys = found.split(", ")
    near = {"rl": ("rl", "stages"), "stages": ("stages", "rl")}.get(sections[0], sections[:1]) if sections else ()
    own = [ours for ours in keys if ours.split(".")[0] in near]
    chosen = [ours for ours in own or keys if ours != key]
    return f"{key}: unknown key; here it is {' or '.join(chosen)}" if chosen else None
