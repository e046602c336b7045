"""Translate a recipe and a hardware profile into verl's configuration for RL and SFT, as overrides of verl's Hydra files."""

import importlib.util
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import Profile
from rstar_lab.rl.recipe.explain import advice
from rstar_lab.rl.recipe.sft import Lora, SftConfig
from rstar_lab.rl.rollout.checks import MAX_PROMPT_TOKENS
from rstar_lab.rl.verl.settings import Settings, checkpointed

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
# A recipe override that starts with `verl.` sets a key of verl: --set verl.trainer.logger='[console,wandb]'
PREFIX = "verl."
OF_THE_RECIPE = ("set rl.", "set model", "set stages.", "set evaluate.")
PACKED_ATTENTION = "rstar_packed"  # name under which attention.py registers in transformers
PLACEHOLDER_ROWS = "placeholder_rows.parquet"  # verl's data set (train.write_placeholder_rows)
NO_SEPARATE_ASYNC = (
    "separate_async is not supported: it needs GPUs for engines only and a weight transport between them and the trainer, which "
    "the adapter does not set up; use rl.schedule.type=async, which runs on colocate_async"
)
# verl keys that users cannot set, with all that begin with them, each with the reason or the recipe key to use instead. Keys whose
# `advice` names a recipe key cannot be set either.
FIXED_KEYS = {
    "algorithm.filter_groups": "rstar_lab's sampler requests new groups: set rl.schedule.dynamic_sampling",
    "trainer.v1.trainer_mode": f"set rl.schedule.type (sync, or async for colocate_async); {NO_SEPARATE_ASYNC}",
    "trainer.v1.separate_async": NO_SEPARATE_ASYNC,
    "trainer.v1.colocate_async": "set rl.schedule.max_staleness and rl.schedule.buffer_groups",
    "trainer.v1.sampler.max_off_policy": "set rl.schedule.max_staleness and rl.schedule.when_stale",
    "algorithm.rollout_correction": "set rl.correction and rl.old_log_probs",
    "trainer.v1.sampler.custom_sampler": "RoC and the run store use it",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "it selects the problems of a step",
    "actor_rollout_ref.rollout.name": "rstar_lab schedules vLLM servers; SGLang is not supported",
    "actor_rollout_ref.rollout.n": "set rl.group_size, the rollouts kept, and rl.method.roc.oversample",
    "actor_rollout_ref.rollout.router_config_path": "set engine.scheduler",
    "actor_rollout_ref.rollout.disable_log_stats": "the scheduler reads the servers' metrics",
    "actor_rollout_ref.actor.clip_ratio": "set rl.method.clip_low and rl.method.clip_high",
    "actor_rollout_ref.actor.kl_loss": "set rl.method.kl_coefficient",
    "actor_rollout_ref.actor.entropy_coeff": "the loss of rstar_lab has no entropy term",
    "trainer.test_freq": "verl would validate on training problems: set evaluate.during.every",
    "trainer.val": "rstar_lab evaluates the sets of the recipe: set evaluate.during.every",
    "trainer.default_local_dir": "checkpoints belong to the run: set --runs-dir",
    "trainer.resume_mode": "a run always resumes from its checkpoint: use --set name=... for another run",
}


def split_overrides(
    overrides: Mapping[str, Any], profile: Profile | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split overrides into (recipe keys, verl keys without their prefix). Raises UserError for a key of verl if the profile has
    another trainer."""
    verl_keys = {key.removeprefix(PREFIX): value for key, value in overrides.items() if key.startswith(PREFIX)}
    if verl_keys and profile is not None and profile.trainer != "verl":
        raise UserError(f"{PREFIX}{min(verl_keys)}: profile {profile.name} does not use verl; leave the key out")
    return {key: value for key, value in overrides.items() if not key.startswith(PREFIX)}, verl_keys


def overrides(
    settings: Settings, profile: Profile, model: Path, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the verl keys for one stage of a recipe on a hardware profile. extra: verl keys that take precedence."""
    keys, hardware = settings.rl, profile.hardware
    engine, parallel = profile.engine, profile.parallelism
    recipe, run_dir = settings.recipe, settings.run_dir
    on_cpu = hardware.gpus == 0
    for key in extra or {}:
        bare = key.lstrip("+~")
        named = [fixed for fixed in FIXED_KEYS if re.match(rf"{re.escape(fixed)}(?![a-z])", bare)]
        reason = FIXED_KEYS[max(named, key=len)] if named else advice(bare)
        if reason and (named or reason.startswith(OF_THE_RECIPE)):
            raise UserError(f"verl.{key}: {reason}")
    last_step = settings.first_step + settings.stage.steps - 1
    longest = MAX_PROMPT_TOKENS + keys.limits.max_response_tokens
    evaluate = recipe.evaluate
    most = max(evaluate.max_response_tokens, evaluate.in_training().max_response_tokens)
    evaluated = MAX_PROMPT_TOKENS + (most if evaluate.sets else 0)
    tokens = tokens_per_gpu(profile, longest)
    is_async = keys.schedule.type == "async"
    groups = max(keys.problems_per_step, keys.asynchronous.groups(keys.problems_per_step) if is_async else 0)
    in_fp32 = keys.precision == "fp32" or (keys.precision == "auto" and (on_cpu or engine.dtype == "float32"))
    # The keys of the loss are not among them: `objective.StreamLoss` reads the recipe.
    options: dict[str, Any] = {
        "data.train_files": str(run_dir / PLACEHOLDER_ROWS),
        "data.val_files": str(run_dir / PLACEHOLDER_ROWS),
        "data.train_batch_size": keys.problems_per_step,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "data.gen_batch_size": 1 if keys.sync.dynamic_sampling or is_async else None,
        "data.max_prompt_length": MAX_PROMPT_TOKENS,
        "data.max_response_length": keys.limits.max_response_tokens,
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.model.external_lib": "rstar_lab.rl.verl.hooks",
        "actor_rollout_ref.model.enable_gradient_checkpointing": keys.gradient_checkpointing or not on_cpu,
        "+actor_rollout_ref.model.override_config": override_config(flash=not on_cpu and not in_fp32),
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size": keys.problems_per_step // keys.mini_batches,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": tokens,
        "actor_rollout_ref.actor.use_kl_loss": keys.method.kl_coefficient > 0,
        "actor_rollout_ref.actor.kl_loss_coef": keys.method.kl_coefficient,
        "actor_rollout_ref.actor.optim.lr": keys.lr,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": keys.warmup_steps,
        "actor_rollout_ref.actor.optim.weight_decay": keys.weight_decay,
        "actor_rollout_ref.actor.optim.clip_grad": keys.max_grad_norm,
        "actor_rollout_ref.actor.grad_clip": keys.max_grad_norm,
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": parallel.offload_optimizer,
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": not on_cpu,
        "actor_rollout_ref.actor.use_torch_compile": not on_cpu,
        "actor_rollout_ref.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        "actor_rollout_ref.rollout.name": "rstar" if on_cpu else "vllm",
        "actor_rollout_ref.rollout.n": keys.group_size,
        "actor_rollout_ref.rollout.temperature": keys.temperature,
        "actor_rollout_ref.rollout.prompt_length": MAX_PROMPT_TOKENS,
        "actor_rollout_ref.rollout.response_length": keys.limits.max_response_tokens,
        "actor_rollout_ref.rollout.max_model_len": max(longest, evaluated),
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": tokens,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": engine.tensor_parallel,
        "actor_rollout_ref.rollout.gpu_memory_utilization": engine.memory_utilization,
        "actor_rollout_ref.rollout.dtype": "float32" if on_cpu else engine.dtype,
        "actor_rollout_ref.rollout.enforce_eager": engine.eager,
        "actor_rollout_ref.rollout.max_num_seqs": engine.max_sequences,
        "actor_rollout_ref.rollout.disable_log_stats": False,  # the scheduler reads the servers' metrics
        "actor_rollout_ref.rollout.agent.num_workers": max(1, hardware.nodes * (1 if on_cpu else 4)),
        "actor_rollout_ref.rollout.agent.default_agent_loop": "rstar",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": "rstar_lab.rl.verl.manager.OversamplingManager",
        "reward.num_workers": 0,  # the agent loop computes the reward
        "algorithm.adv_estimator": "rstar",
        "critic.enable": False,
        "trainer.v1.trainer_mode": "rstar_colocate_async" if is_async else "rstar",
        "trainer.v1.sampler.custom_sampler.path": "pkg://rstar_lab.rl.verl.sampler",
        "trainer.v1.sampler.custom_sampler.name": "RocReplayBufferAsync" if is_async else "RocReplayBuffer",
        "trainer.v1.sampler.max_off_policy_threshold": None,  # the sampler counts updates, verl counts steps
        "trainer.total_training_steps": last_step,
        "trainer.total_epochs": last_step + 1,  # the rows of one step are an epoch
        "trainer.save_freq": keys.checkpoint_every,
        "trainer.val_before_train": False,
        "trainer.max_actor_ckpt_to_keep": keys.keep_checkpoints,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": max(1, 2 * hardware.nodes) if not on_cpu else 1,
        "transfer_queue.backend.SimpleStorage.total_storage_size": 4 * groups * keys.rollouts_per_group,
    }
    if 0 < checkpointed(run_dir) == settings.first_step - 1:
        # A new stage restarts the learning-rate schedule and, with reset_optimizer, the optimizer.
        contents = ["model"] if settings.stage.reset_optimizer else ["model", "optimizer"]
        options["actor_rollout_ref.actor.checkpoint.load_contents"] = contents
    options |= _common(profile, run_dir) | _lora("actor_rollout_ref.model", keys.lora)
    if keys.old_log_probs == "engine":
        options["algorithm.rollout_correction.bypass_mode"] = True
    for model_name in ("actor", "ref"):
        section = f"actor_rollout_ref.{model_name}.fsdp_config"
        options[f"{section}.fsdp_size"] = parallel.fsdp_size
        options[f"{section}.param_offload"] = parallel.offload_params
        options[f"{section}.ulysses_sequence_parallel_size"] = parallel.sequence_parallel
        if in_fp32:
            options[f"+{section}.mixed_precision"] = FP32
    if on_cpu:
        engine_section = recipe.engine.model_dump() | {"dtype": "float32"}
        of_engine = {"section": engine_section, "max_tokens": longest, "seed": recipe.seed, "logs": str(run_dir)}
        engine_keys = {"factory": "rstar_lab.rl.verl.engine:CpuVllm", "options": of_engine}
        options["+actor_rollout_ref.rollout.engine_kwargs.rstar"] = engine_keys
    for key, value in (extra or {}).items():
        options.pop("+" + key.removeprefix("+"), None)
        options.pop(key.removeprefix("+"), None)
        options[key] = value
    if "console" not in options["trainer.logger"]:
        options["trainer.logger"] = ["console", *options["trainer.logger"]]
    options["+trainer.v1.sampler.sampler_kwargs"] = {
        "rstar": settings.as_config(), "poll_interval": 0.1 if on_cpu else 2.0,
    }  # fmt: skip
    options["+rstar"] = settings.as_config()
    return options


def sft_overrides(sft: SftConfig, profile: Profile, model: Path, run_dir: Path, steps: int) -> dict[str, Any]:
    """Return the verl keys for the SFT of a recipe on a hardware profile; `sft_trainer.RstarSft` provides the data."""
    hardware, parallel = profile.hardware, profile.parallelism
    on_cpu = hardware.gpus == 0
    in_fp32 = sft.precision == "fp32" or (sft.precision == "auto" and on_cpu)
    options: dict[str, Any] = {
        "data.train_files": None,
        "data.train_batch_size": sft.batch_size,
        "data.max_token_len_per_gpu": tokens_per_gpu(profile, sft.max_tokens),
        "model.path": str(model),
        "model.enable_gradient_checkpointing": sft.gradient_checkpointing or not on_cpu,
        "+model.override_config": override_config(flash=not on_cpu and not in_fp32),
        "engine.strategy": "fsdp2",
        "engine.fsdp_size": parallel.fsdp_size,
        "engine.param_offload": parallel.offload_params,
        "engine.optimizer_offload": parallel.offload_optimizer,
        "engine.ulysses_sequence_parallel_size": parallel.sequence_parallel,
        "engine.use_torch_compile": not on_cpu,
        "optim.lr": sft.lr,
        "optim.lr_scheduler_type": "cosine",
        "optim.lr_warmup_steps": math.ceil(sft.warmup * steps),
        "optim.zero_indexed_step": False,  # without it, the first update has a learning rate of 0
        "optim.weight_decay": sft.weight_decay,
        "optim.clip_grad": sft.grad_clip,
        "checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        "trainer.total_epochs": 1,  # all steps are one pass through the batches
        "trainer.save_freq": sft.checkpoint_every,
        "trainer.max_ckpt_to_keep": 2,  # with 1, a kill between deleting the old and marking the new one would lose both
    }
    if in_fp32:
        options["+engine.mixed_precision"] = FP32
    return options | _common(profile, run_dir) | _lora("model", sft.lora)


def _common(profile: Profile, run_dir: Path) -> dict[str, Any]:
    """Return the keys that both trainers of verl have."""
    hardware = profile.hardware
    options = {
        "trainer.nnodes": hardware.nodes,
        "trainer.n_gpus_per_node": max(1, hardware.gpus_per_node),
        "trainer.default_local_dir": str(run_dir / "verl"),
        "trainer.project_name": "rstar_lab",
        "trainer.experiment_name": run_dir.name,
        "trainer.logger": ["console"],
    }
    return options | ({"trainer.device": "cpu"} if hardware.gpus == 0 else {})


def _lora(section: str, lora: Lora | None) -> dict[str, Any]:
    if lora is None:
        return {}
    names = {"lora_rank": lora.rank, "lora_alpha": lora.resolved_alpha, "target_modules": list(lora.targets)}
    return {f"{section}.{name}": value for name, value in names.items()}


def override_config(*, flash: bool) -> dict[str, Any]:
    """Return verl's overrides of the model's configuration. The attention is flash-attn if it is installed here, else attention.py.

    flash: whether the job can use flash-attn, which needs a GPU and bf16.
    """
    implementation = "flash_attention_2" if flash and importlib.util.find_spec("flash_attn") else PACKED_ATTENTION
    # Without `model_config`, verl saves the overrides with the model.
    return {"attn_implementation": implementation, "model_config": {}}


def tokens_per_gpu(profile: Profile, longest: int) -> int:
    """Return the tokens of a micro-batch per GPU: at least the longest sequence, split over the GPUs that share it."""
    return max(profile.parallelism.tokens_per_gpu, -(-longest // profile.parallelism.sequence_parallel))


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the keys as overrides in Hydra's syntax."""
    return [f"{key}={_quote(value)}" for key, value in options.items()]


def _quote(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, int | float):
        return json.dumps(value)
    if isinstance(value, str):
        # In Hydra's syntax a backslash is literal unless it precedes a quote.
        return "'" + re.sub(r"(\\*)('|\Z)", lambda end: end[1] * 2 + ("\\'" if end[2] else ""), value) + "'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_quote(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(_quote(item) for item in value) + "]"


def compose(options: Mapping[str, Any], of: str = "ppo_trainer") -> Any:
    """Return the complete configuration of a verl trainer, composed from verl's files and validated by verl.

    Raises UserError that names a key that verl does not have.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        try:
            return hydra.compose(of, overrides=as_arguments(options))
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(f"verl: {' '.join(str(error).split())}") from error
