"""The keys of a recipe and a profile that a rehearsal executes. A key that no rule names counts as not covered."""

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from rstar_lab.profiles import Profile
from rstar_lab.rl.recipe import Recipe

# Keys that the rehearsal executes, possibly with a smaller value.
COVERED = (
    "name", "seed", "model", "runs", "stages.*", "rl.*", "sft.*", "sandbox.timeout_s", "sandbox.memory_mb", "sandbox.url",
    "sandbox.fault_share", "engine.max_batch", "engine.dtype", "engine.kind", "engine.stall_s", "engine.deadline_s",
    "evaluate.sets.*", "evaluate.samples", "evaluate.temperature", "evaluate.top_p", "evaluate.max_turns",
    "evaluate.max_response_tokens", "evaluate.every", "engine.scheduler", "engine.mismatch_limit",
    "profile.name", "profile.description", "profile.trainer", "profile.hardware.nodes", "profile.storage.*",
    "profile.sandbox.redis", "profile.sandbox.workers_per_node", "profile.env.*", "profile.secrets", "profile.engine.max_sequences",
    "profile.engine.eager", "profile.parallelism.tokens_per_gpu", "profile.parallelism.fsdp_size",
    "profile.parallelism.sequence_parallel",
)  # fmt: skip
# Keys that a rehearsal on a CPU cannot execute, with the reason. These take precedence over COVERED.
NOT_COVERED = {
    "profile.hardware.*": "this machine has other hardware",
    "profile.backend": "the rehearsal runs as a local job",
    "profile.engine.tensor_parallel": "one CPU per engine",
    "profile.engine.memory_utilization": "applies to GPU memory",
    "profile.engine.kv_cache_dtype_bytes": "applies to the memory estimate",
    "profile.engine.dtype": "float32 on a CPU",
    "profile.parallelism.offload_*": "there is no GPU memory to free",
    "profile.measured.*": "efficiencies of the time estimate",
    "profile.sandbox.call_s": "read by the estimate only",
    "profile.image": "no container is started",
    "profile.slurm.*": "no Slurm job is submitted",
    "profile.ssh.*": "no job is sent to another machine",
    "profile.kuberay.*": "no job is sent to Kubernetes",
    "*.precision": "float32 on a CPU",
    "vocabulary": "the tokenizer is that of tiny_fast",
    "engine.memory_share": "applies to GPU memory",
    "engine.dtype": "float32 on a CPU",
    "engine.teacher_url": "the teacher has another tokenizer than the model of the rehearsal",
    "sandbox.url": "a service named by the recipe is replaced by one that the job starts",
}
LOCAL_TRAINER_ONLY = (
    "processes", "engine.count", "engine.kv_cache_gb", "rl.micro_batch_tokens", "rl.rollout",
)  # fmt: skip

VERL_ONLY = ("profile.parallelism.fsdp_size", "profile.parallelism.sequence_parallel")


def flatten(data: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys of a nested mapping that have a value. Stages are named, not numbered."""
    keys = []
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            keys += flatten(value, f"{key}.")
        elif name == "stages":
            for stage in value:
                keys += flatten({k: v for k, v in stage.items() if k != "name"}, f"stages.{stage['name']}.")
        elif value not in (None, "", [], ()):
            keys.append(key)
    return keys


def coverage(recipe: Recipe, profile: Profile) -> tuple[list[str], list[str]]:
    """Return (keys that the rehearsal executes, "key: reason" of all others)."""
    keys = flatten(recipe.model_dump(mode="json")) + flatten({"profile": profile.model_dump(mode="json")})
    covered, missing = [], []
    for key in keys:
        reason = _reason(key, recipe, profile)
        if reason is None:
            covered.append(key)
        else:
            missing.append(f"{key}: {reason}")
    return covered, missing


def _reason(key: str, recipe: Recipe, profile: Profile) -> str | None:
    """Return why a key is not executed, or None if it is."""
    if profile.trainer == "verl" and key in LOCAL_TRAINER_ONLY:
        return "read by the local trainer only"
    if profile.trainer == "local" and key in VERL_ONLY:
        return "read by verl only"
    if key == "profile.hardware.nodes" and profile.trainer == "verl":
        return None
    if key.endswith(".teacher_weight") and recipe.engine.teacher_url is not None:
        return NOT_COVERED["engine.teacher_url"]
    if key == "sandbox.url" and recipe.sandbox.url == "local":
        return None
    for pattern, reason in NOT_COVERED.items():
        if fnmatch(key, pattern):
            return reason
    if profile.trainer == "local" and key in LOCAL_TRAINER_ONLY:
        return None
    if any(fnmatch(key, pattern) for pattern in COVERED):
        return None
    return "no phase reads it"
