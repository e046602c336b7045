"""Preflight checks of what a job starts besides its trainer, of how the model divides among GPUs, and the dry run."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from rstar_lab.errors import UserError
from rstar_lab.hardware.container import is_file, registry_image, slurm_runtime
from rstar_lab.hardware.profiles import Profile
from rstar_lab.rl.preflight.context import CheckContext, NotNeeded, Skip
from rstar_lab.rl.preflight.estimate import GB

TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")  # loggers that need a package of the same name

DRY_RUN_S, DRY_RUN_GB = 60, 2.0  # limit of the time of a dry run in preflight, and the memory that it needs


def dry_run(context: CheckContext, arguments: tuple[str, str, Mapping[str, Any], str | None]) -> str:
    """Run one update at full size on fake tensors, in another process. arguments: those of `dry_run_in_child`.

    Raises Skip if memory or time does not suffice or the dry run fails, and UserError if an update does not fit into a GPU.
    """
    profile = context.gpu_profile
    if not (profile.hardware.bf16_tflops and profile.hardware.hbm_tb_per_s):
        raise Skip(f"profile {profile.name} has no peak rates (hbm_tb_per_s, bf16_tflops)")
    context.architecture  # noqa: B018
    free = psutil.virtual_memory().available / GB
    if free < DRY_RUN_GB:
        raise Skip(f"it needs {DRY_RUN_GB:g} GB of memory; {free:.1f} GB are available on this machine")
    try:
        rows, finished = dry_run_in_child(*arguments, timeout_s=DRY_RUN_S)
    except UserError as error:
        raise Skip(str(error)) from error
    found = [
        f"{row['dry_run']} {row['peak_gb']:.1f} GB, with margin {row['with_margin_gb']:.1f} GB, engine {row['engine_gb']:.1f} GB"
        for row in rows
    ]
    if not all(row["fits"] for row in rows):
        engine = " beside the engine" if profile.trainer == "local" else ""
        raise UserError(f"{'; '.join(found)}: does not fit into {profile.hardware.hbm_gb:g} GB{engine}")
    if not finished:
        found.append(
            f"{'the rest' if rows else 'it'} takes more than {DRY_RUN_S} s on this machine; run it with --dry-run"
        )
    if not rows:
        raise Skip(found[-1])
    return f"peak per GPU: {'; '.join(found)}"


def dry_run_in_child(
    recipe: str,
    profile: str,
    overrides: Mapping[str, Any],
    trainer: str | None = None,
    *,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[list[dict[str, Any]], bool]:
    """Run `rstar-lab preflight --dry-run` in a process of its own; return its rows, and whether it ended within `timeout_s`.

    environment: additional variables of the process. Raises UserError if it fails.
    """
    command = [sys.executable, "-m", "rstar_lab.cli", "preflight", recipe, "--profile", profile, "--dry-run", "--json"]
    command += ["--trainer", trainer] if trainer else []
    for key, value in overrides.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **(environment or {})}
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as expired:
        output, code = (expired.stdout or b"").decode(), None
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if code and all(row["fits"] for row in rows):
        raise UserError(f"the dry run failed: {done.stderr.strip()[-400:]}")
    return rows, code is not None


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


def container(context: CheckContext) -> str:
    """Check that the backend can start the profile's container, and that its file exists."""
    profile = context.profile
    if not _runs_in_container(profile):
        raise NotNeeded("the job runs without a container")
    if profile.backend != "slurm":
        image = registry_image(profile, profile.backend)
        return f"{'podman on every node starts' if profile.backend == 'ray' else 'the pods run'} {image}"
    image = profile.container or ""
    if is_file(image) and not Path(image).exists():
        raise UserError(
            f"container: {image}: no such file; build it as docs/jobs.md shows, or delete the key in profile {profile.name} if "
            "all nodes have the packages"
        )
    return f"{slurm_runtime(image)} starts {image}"


def programs(context: CheckContext) -> str:
    """Check redis-server and the packages of the loggers."""
    profile = context.profile
    starts_redis = profile.sandbox.redis and context.recipe.sandbox.url == "local" and profile.backend != "kuberay"
    missing = [f"package {name}, for a logger" for name in _loggers(context) if importlib.util.find_spec(name) is None]
    if starts_redis and "RSTAR_LAB_REDIS_URL" not in os.environ and not shutil.which("redis-server"):
        missing.append("redis-server, for sandbox.redis")
    if missing and _runs_in_container(profile):
        return f"the image must contain {', '.join(missing)}"
    if missing and profile.backend == "local":
        raise UserError(f"not installed: {', '.join(missing)}")
    if missing:
        raise Skip(f"not installed on this machine; the nodes must have it: {', '.join(missing)}")
    return "everything that the job starts is installed"


def _runs_in_container(profile: Profile) -> bool:
    return profile.container is not None and profile.backend in ("slurm", "ray", "kuberay")


def _loggers(context: CheckContext) -> list[str]:
    verls = context.verl_overrides.get("trainer.logger", ()) if context.profile.trainer == "verl" else ()
    return [name for name in (*context.recipe.log_to, *verls) if name in TRACKERS]
