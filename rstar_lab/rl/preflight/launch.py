"""Preflight checks of what a job starts besides its trainer, and of how the model divides among GPUs."""

import importlib.util
import os
import shutil
from pathlib import Path

from rstar_lab.errors import UserError
from rstar_lab.rl.preflight.context import CheckContext, NotNeeded, Skip

TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")  # loggers that need a package of the same name


def parallelism(context: CheckContext) -> str:
    """Check that the model's heads divide among the GPUs of an engine and of a sequence, and the GPUs among shards."""
    profile = context.gpu_profile
    if profile.trainer != "verl":
        raise NotNeeded("the local trainer and its engines use one GPU each")
    model, parallel, gpus = context.architecture, profile.parallelism, profile.hardware.gpus
    if profile.engine.tensor_parallel > profile.hardware.gpus_per_node:
        raise UserError(
            f"engine.tensor_parallel: {profile.engine.tensor_parallel} in profile {profile.name}, but a node has "
            f"{profile.hardware.gpus_per_node} GPUs"
        )
    if parallel.fsdp_size > 0 and gpus % parallel.fsdp_size:
        raise UserError(
            f"parallelism.fsdp_size: {parallel.fsdp_size} in profile {profile.name} does not divide its {gpus} GPUs"
        )
    for key, parts in (
        ("engine.tensor_parallel", profile.engine.tensor_parallel),
        ("parallelism.sequence_parallel", parallel.sequence_parallel),
    ):
        if model.heads % parts or (model.kv_heads % parts and parts % model.kv_heads):
            raise UserError(
                f"{key}: {parts} in profile {profile.name} does not divide the {model.heads} attention heads and "
                f"{model.kv_heads} KV heads of {context.recipe.model}"
            )
    return (
        f"{model.heads} heads and {model.kv_heads} KV heads; engines on {profile.engine.tensor_parallel} GPUs, sequences on "
        f"{parallel.sequence_parallel}, shards on {parallel.fsdp_size if parallel.fsdp_size > 0 else gpus}"
    )


def programs(context: CheckContext) -> str:
    """Check redis-server, the container image and the packages of the loggers."""
    profile, found = context.profile, []
    container = profile.slurm.container if profile.backend == "slurm" else None
    if container and _is_path(profile.image) and not Path(profile.image or "").exists():
        raise UserError(f"image: {profile.image}: no such file; profile {profile.name} starts it with {container}")
    if container:
        found.append(f"{container} starts {profile.image}")
    in_image = container is not None or profile.backend == "kuberay"
    starts_redis = profile.sandbox.redis and context.recipe.sandbox.url == "local" and profile.backend != "kuberay"
    missing = [f"package {name}, for a logger" for name in _loggers(context) if importlib.util.find_spec(name) is None]
    if starts_redis and "RSTAR_LAB_REDIS_URL" not in os.environ and not shutil.which("redis-server"):
        missing.append("redis-server, for sandbox.redis")
    if missing and in_image:
        found.append(f"the image must contain {', '.join(missing)}")
    elif missing and profile.backend == "local":
        raise UserError(f"not installed: {', '.join(missing)}")
    elif missing:
        raise Skip(f"not installed on this machine; the nodes must have it: {', '.join(missing)}")
    return "; ".join(found) or "everything that the job starts is installed"


def _loggers(context: CheckContext) -> list[str]:
    verls = context.verl_overrides.get("trainer.logger", ()) if context.profile.trainer == "verl" else ()
    return [name for name in (*context.recipe.log_to, *verls) if name in TRACKERS]


def _is_path(image: str | None) -> bool:
    return image is None or image.startswith(("/", ".")) or image.endswith((".sif", ".sqsh"))
