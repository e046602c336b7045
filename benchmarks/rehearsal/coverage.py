"""Find the keys of a recipe and a profile that a rehearsal covers.

A key is covered if a process of the job read it (`key_reads`) and the rehearsal keeps its value or only makes it smaller,
or if it is in `DRY_RUN` and the dry run of an update at full size read it.
"""

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from pydantic import BaseModel

from rstar_lab.hardware.profiles import Profile
from rstar_lab.rl.methods.opd import Opd
from rstar_lab.rl.recipe import Recipe, RlSection, Stage

# Keys that a rehearsal cannot cover, because it replaces their value or because they have no effect on a CPU -> reason.
REPLACED = {
    "profile.name": "descriptive text",
    "profile.description": "descriptive text",
    "profile.hardware.*": "this machine has other hardware",
    "profile.backend": "the rehearsal runs as a local job",
    "profile.engine.tensor_parallel": "one CPU per engine",
    "profile.engine.memory_utilization": "applies to GPU memory",
    "profile.engine.kv_cache_dtype_bytes": "applies to the memory estimate",
    "profile.engine.dtype": "float32 on a CPU",
    "profile.parallelism.offload_*": "there is no GPU memory to free",
    "profile.measured.*": "used only by the time estimate",
    "profile.sandbox.call_s": "used only by the time estimate",
    "profile.container": "no container is started",
    "profile.slurm.*": "no Slurm job is submitted",
    "profile.ssh.*": "no job is sent to another machine",
    "profile.kuberay.*": "no job is sent to Kubernetes",
    "*.precision": "float32 on a CPU",
    "vocabulary": "the rehearsal uses the tokenizer of tiny_fast",
    "engine.gpu_memory_utilization": "applies to GPU memory",
    "engine.dtype": "float32 on a CPU",
    "engine.teacher_url": "the tokenizer of the teacher differs from that of the rehearsal's model",
    "sandbox.url": "the job starts its own sandbox service",
}
# Of these, the keys that decide what the dry run of an update executes: ranks and their groups, precision, rates.
DRY_RUN = (
    "profile.hardware.nodes", "profile.hardware.gpus_per_node", "profile.hardware.hbm_gb", "profile.hardware.hbm_tb_per_s",
    "profile.hardware.bf16_tflops", "profile.measured.link_gb_per_s", "profile.measured.network_gb_per_s", "*.precision",
    "engine.gpu_memory_utilization", "engine.dtype", "profile.engine.dtype", "profile.engine.memory_utilization",
)  # fmt: skip


def fields_of(
    section: BaseModel, prefix: str = "", parents: tuple[tuple[str, ...], ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, fields on the path to it) for all keys that have a value. Stages are named, not numbered.

    A field is a tuple of its names `Class.field`, one for each class that defines or inherits it.
    """
    for name in type(section).model_fields:
        if name == "type":  # it selects the section, whose keys are listed
            continue
        value, key, fields = section.__dict__[name], f"{prefix}{name}", (*parents, _names(type(section), name))
        if isinstance(value, BaseModel):
            yield from fields_of(value, f"{key}.", fields)
        elif isinstance(section, Stage) and name == "rl":
            yield from ((f"{key}.{own}", (*fields, _names(RlSection, own))) for own in value)
        elif isinstance(value, Mapping):
            for own, item in value.items():
                inner = (
                    fields_of(item, f"{key}.{own}.", fields)
                    if isinstance(item, BaseModel)
                    else [(f"{key}.{own}", fields)]
                )
                yield from inner
        elif name == "stages":
            for stage in value:
                for own, rest in fields_of(stage, f"stages.{stage.name}.", fields):
                    if own != f"stages.{stage.name}.name":
                        yield own, rest
        elif value not in (None, "", [], ()):
            yield key, fields


def _names(section: type[BaseModel], field: str) -> tuple[str, ...]:
    classes = [base for base in section.__mro__ if field in getattr(base, "model_fields", {})]
    return tuple(f"{base.__name__}.{field}" for base in classes)


def all_keys(recipe: Recipe, profile: Profile) -> dict[str, Any]:
    """Return the fields on the path to each key of recipe and profile, by dotted key. Keys of the profile begin with `profile.`."""
    return dict(fields_of(recipe)) | dict(fields_of(profile, "profile."))


def coverage(
    recipe: Recipe, profile: Profile, reads: Collection[str], dry_reads: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Return (covered keys, "key: reason" for all other keys). reads: fields that processes of the job read. dry_reads: those
    that the dry run read."""
    covered, missing = [], []
    for key, fields in all_keys(recipe, profile).items():
        dry = any(fnmatch(key, pattern) for pattern in DRY_RUN)
        if dry and all(any(name in dry_reads for name in names) for names in fields):
            covered.append(key)
            continue
        reason = _reason(key, recipe, profile)
        if reason is None and not all(any(name in reads for name in names) for names in fields):
            reason = f"no process of the job read it (trainer {profile.trainer})"
        if reason is None:
            covered.append(key)
        else:
            missing.append(f"{key}: {reason}")
    return covered, missing


def _reason(key: str, recipe: Recipe, profile: Profile) -> str | None:
    """Return why the rehearsal does not use the value of a key, or None if it does."""
    if key == "profile.hardware.nodes" and profile.trainer == "verl":
        return None if profile.hardware.nodes > 1 else "the rehearsal runs on two nodes"
    if key == "rl.method.add" and recipe.rl.method.added(Opd):
        return REPLACED["engine.teacher_url"]
    if key == "sandbox.url" and recipe.sandbox.url == "local":
        return None
    return next((reason for pattern, reason in REPLACED.items() if fnmatch(key, pattern)), None)
