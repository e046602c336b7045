"""Preflight checks of the machine and of what a job starts: sandbox, memory, disk, GPUs, versions, time, container, programs."""

import asyncio
import importlib.util
import os
import shutil
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.container import is_amd, is_file, registry_image, slurm_runtime
from rstar_lab.hardware.profiles import Profile
from rstar_lab.rl.preflight import estimate
from rstar_lab.rl.preflight.context import CheckContext, NotNeeded, Skip, Warn
from rstar_lab.untrusted.text import counted

# The rStar2-Agent report trains its recipe in one week: 510 steps on 64 MI300X.
PAPER_STEPS, PAPER_HOURS = 510, 168.0

CALL_CPU_S = 0.0047  # CPU time of a call in a typical mix (docs/sandbox.md); its latency includes queueing
TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")  # loggers that need a package of the same name


def sandbox(context: CheckContext) -> str:
    """Check that the sandbox can be reached and runs a step's calls within its generation time."""
    section, stages = context.recipe.sandbox, map(context.recipe.settings, context.recipe.stages)
    rollouts = max((rl.problems_per_step * rl.group_size * rl.method.roc.oversample for rl in stages), default=0)
    calls = rollouts * estimate.CALLS_PER_ROLLOUT
    hardware, settings = context.profile.hardware, context.profile.sandbox
    workers = (settings.workers_per_node or hardware.cpus_per_node) * hardware.nodes
    if section.url != "local":
        try:
            seconds = asyncio.run(_probe(section))
        except Exception as error:
            raise Skip(f"{section.url} does not answer from this machine ({type(error).__name__})") from error
        return _load_message(context, calls, seconds, workers)
    if settings.redis:
        started = f"Redis, a service and {counted(workers, 'worker')} on {counted(hardware.nodes, 'node')}"
        return f"the job starts {started}; {_load_message(context, calls, CALL_CPU_S, workers)}"
    if context.profile.backend != "local":
        raise Skip(f"the sandbox of {context.profile.name} runs on its nodes; a step makes {calls:.0f} calls")
    return _load_message(context, calls, asyncio.run(_probe(section)), section.workers or hardware.cpus_per_node)


def _load_message(context: CheckContext, calls: float, seconds: float, workers: int) -> str:
    """Describe the load of a step. Raises UserError if the calls take longer than the generation."""
    load = calls * seconds / max(1, workers)
    message = f"{seconds * 1e3:.1f} ms per call; {calls:.0f} calls in a step keep {counted(workers, 'worker')} busy for {load:.0f} s"
    if context.profile.hardware.gpus and context.recipe.stages:
        sections = map(context.recipe.settings, context.recipe.stages)
        shape, profile = context.architecture, context.profile
        longest = max(estimate.step_time(shape, rl, profile, context.recipe).generation for rl in sections)
        if load > longest:
            raise UserError(
                f"{message}, longer than the generation of {longest:.0f} s; increase sandbox.workers_per_node in the profile"
            )
    return message


async def _probe(section: Any, count: int = 5) -> float:
    """Return the median seconds of a call. Raises UserError for a wrong result."""
    from rstar_lab.sandbox import Limits, LocalSandbox, SandboxClient

    box: Any = SandboxClient(section.url, deadline_s=10.0)
    if section.url == "local":
        limits = Limits(timeout_s=section.timeout_s, memory_mb=section.memory_mb)
        box = LocalSandbox(limits, 1, isolation=section.isolation)
    seconds = []
    async with box:
        if section.url != "local":
            await box.http.get(f"{box.url}/ping", timeout=10.0)  # without retries: a missing service is a result here
        for number in range(count):
            started = time.monotonic()
            result = await box.run(f"print({number} * 2)")
            seconds.append(time.monotonic() - started)
            if result.stdout.strip() != str(number * 2):
                raise UserError(f"sandbox: it returned {result.outcome} {result.stdout!r}; expected {number * 2}")
    return statistics.median(seconds)


# Memory, batches, disk


def gpu_memory(context: CheckContext) -> str:
    """Compare weights, optimizer, largest micro-batch and KV cache with the HBM, in the stage with the longest responses."""
    if not context.profile.hardware.gpus:
        return estimate.cpu_memory(context)
    profile = context.profile
    stages = [context.recipe.settings(stage) for stage in context.recipe.stages] or [context.recipe.rl]
    rl = max(stages, key=lambda keys: keys.limits.max_response_tokens)
    need = estimate.memory(context.architecture, context.recipe, rl, profile)
    joined = f" together {need.peak:.0f} GB" if need.together else ""
    message = (
        f"training {need.training_peak:.0f} GB (state {need.training_state:.0f}), rollout {need.rollout_peak:.0f} GB,{joined} of "
        f"{need.hbm:.0f} GB; KV cache {need.kv_tokens} tokens per replica = {need.kv_tokens // max(1, need.longest)} rollouts "
        f"of the longest {need.longest}"
    )
    if need.peak <= need.hbm and need.kv_tokens < need.served:
        raise UserError(
            f"{message}; the engine is started for sequences of {need.served} tokens, which do not fit into its KV cache: decrease "
            "evaluate.max_response_tokens or rl.limits.max_response_tokens, or increase "
            f"{'engine.gpu_memory_utilization' if need.together else 'engine.memory_utilization in the profile'}"
        )
    if not need.fits:
        remedy = (
            "decrease engine.gpu_memory_utilization or rl.micro_batch_tokens, or set rl.gradient_checkpointing"
            if need.together
            else "increase engine.tensor_parallel or parallelism.sequence_parallel, decrease parallelism.tokens_per_gpu or "
            "engine.memory_utilization, or offload (all in the profile)"
        )
        raise UserError(f"{message}: does not fit; {remedy}")
    return message


def batches(context: CheckContext) -> str:
    """Check that the kept rollouts of a step divide among ranks and mini-batches."""
    if context.profile.trainer == "local":
        raise NotNeeded("the local trainer has one rank")
    profile = context.profile
    gpus, tensor = profile.hardware.gpus, profile.engine.tensor_parallel
    sequence = profile.parallelism.sequence_parallel
    ranks = max(1, gpus // sequence)
    if gpus % (sequence * tensor):
        raise UserError(
            f"profile {profile.name}: {gpus} GPUs do not divide by sequence_parallel {sequence} x tensor_parallel {tensor}"
        )
    lines = []
    for stage in context.recipe.stages:
        rl = context.recipe.settings(stage)
        mini = rl.problems_per_step // rl.mini_batches * rl.group_size
        if mini % ranks:
            raise UserError(
                f"stages.{stage.name}: a mini-batch of {mini} rollouts does not divide among {counted(ranks, 'rank')}"
            )
        lines.append(
            f"{stage.name}: {rl.problems_per_step} x {rl.group_size} = {rl.mini_batches} x {mini} on {counted(ranks, 'rank')}"
        )
    return "; ".join(lines) or "no stages"


def disk(context: CheckContext) -> tuple[str, dict[str, Any]]:
    """Compare checkpoints and transcripts with the free space; on a cluster with `disk_gb` of the profile."""
    checkpoints, store = estimate.disk_bytes(context.architecture, context.recipe, context.profile.trainer)
    needed = (checkpoints + store) / estimate.GB
    free, source = context.profile.hardware.disk_gb, "in the profile"
    if context.profile.backend == "local":
        runs = context.recipe.runs.absolute()
        folder = next(path for path in (runs, *runs.parents) if path.exists())
        free, source = shutil.disk_usage(folder).free / estimate.GB, "free"
    message = f"checkpoints {checkpoints / estimate.GB:.1f} GB, run store {store / estimate.GB:.1f} GB; {free:.0f} GB {source}"
    if needed > free:
        raise UserError(
            f"{message}: too little; decrease rl.keep_checkpoints, set rl.token_arrays: sampled, or use another storage.runs"
        )
    return message, {"checkpoints_gb": checkpoints / estimate.GB, "store_gb": store / estimate.GB, "free_gb": free}


# The machine


def gpu_variables(context: CheckContext) -> str:
    """Check the environment variables that hide GPUs."""
    merged = {**os.environ, **context.profile.env}
    hip, cuda, rocr = (merged.get(f"{kind}_VISIBLE_DEVICES") for kind in ("HIP", "CUDA", "ROCR"))
    if rocr is not None and (hip is not None or cuda is not None):
        raise UserError(
            "ROCR_VISIBLE_DEVICES is set together with HIP_ or CUDA_VISIBLE_DEVICES, which verl rejects; unset ROCR_VISIBLE_DEVICES"
        )
    if hip is not None and cuda is not None and hip != cuda:
        raise UserError(f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} differ: unset one")
    profile = context.gpu_profile
    is_inherited = profile.backend != "slurm"  # the batch script unsets them
    if is_amd(profile) and profile.trainer == "verl" and is_inherited and (hip is not None or cuda is not None):
        raise UserError("HIP_ or CUDA_VISIBLE_DEVICES is set: vLLM stops when verl sets another value; unset both")
    if "expandable_segments:True" in merged.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        raise UserError(
            "PYTORCH_CUDA_ALLOC_CONF contains expandable_segments:True, with which vLLM's sleep mode cannot release memory; unset it"
        )
    return "no conflict"


def versions(context: CheckContext) -> str:
    """Compare the installed versions with those that were tested."""
    under_verl, installed = context.profile.trainer == "verl", {}
    of_verl = ("verl", "ray", "tensordict", "TransferQueue") if under_verl else ()
    for package in ("torch", "transformers", *of_verl):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError as error:
            raise Skip(f"{package} is not installed on this machine; the image of the nodes has it") from error
    summary = ", ".join(f"{name} {version}" for name, version in installed.items())
    if under_verl and not installed["verl"].startswith("0.9."):
        raise Warn(f"{summary}: the adapters were tested with verl 0.9.1")
    if under_verl:
        _check_trl()
    flash = importlib.util.find_spec("flash_attn") and context.profile.hardware.gpus
    return f"{summary}; attention: {'flash_attention_2' if flash else 'sdpa (flash-attn is not installed)'}"


def _check_trl() -> None:
    """Raise UserError if TRL is installed without the class that verl imports from it when it builds a model.

    verl imports AutoModelForCausalLMWithValueHead from trl.experimental.ppo or from trl (models/transformers/monkey_patch.py).
    """
    found = importlib.util.find_spec("trl")
    for folder in map(Path, (found and found.submodule_search_locations) or ()):
        exported = (folder / "__init__.py").read_text() if (folder / "__init__.py").exists() else ""
        if "AutoModelForCausalLMWithValueHead" not in exported and not (folder / "experimental" / "ppo").exists():
            raise UserError(
                f"verl cannot build a model beside the TRL in {folder}, which has no AutoModelForCausalLMWithValueHead; "
                "run `pip uninstall trl` in this environment"
            )


def devices(context: CheckContext) -> str:
    """Compare the GPUs of this machine with the profile."""
    profile = context.gpu_profile
    import torch

    if not torch.cuda.is_available():
        raise Skip("no GPU on this machine")
    count, memory_gb = torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory / estimate.GB
    if count < profile.hardware.gpus_per_node or memory_gb < 0.9 * profile.hardware.hbm_gb:
        raise UserError(
            f"{count} GPUs of {memory_gb:.0f} GB; the profile has {profile.hardware.gpus_per_node} of {profile.hardware.hbm_gb:.0f} GB"
        )
    return f"{count} x {torch.cuda.get_device_name(0)}"


def duration(context: CheckContext) -> tuple[str, dict[str, Any]]:
    """Estimate seconds per step and hours in total, with SFT, filters and evaluations: on GPUs by estimate.FORMULA, on a CPU from
    the speed of this machine.

    For the paper's machine, also give the paper's time.
    """
    profile, recipe = context.profile, context.recipe
    if not profile.hardware.gpus:
        costs = estimate.cpu_costs(context)
    elif profile.hardware.hbm_tb_per_s and profile.hardware.bf16_tflops:
        costs = estimate.gpu_costs(context.architecture, recipe, profile)
    else:
        raise Skip(f"profile {profile.name} has no peak rates (hbm_tb_per_s, bf16_tflops)")
    lines, stages, seconds, steps = [], [], 0.0, 0
    for stage in recipe.stages:
        step_s, parts = costs.step(recipe.settings(stage))
        lines.append(f"{stage.name}: {step_s:.0f} s per step ({parts})")
        stages.append({"name": stage.name, "steps": stage.steps, "step_s": step_s})
        seconds += stage.steps * step_s
        steps += stage.steps
    lines.append(f"{counted(steps, 'step')} = {_time(seconds)}")
    others, missing = estimate.other_time(recipe, costs)
    lines += [f"{part} = {_time(value)}" for part, value in others.items()]
    if missing:
        lines.append(f"not counted: {', '.join(missing)}")
    if steps == PAPER_STEPS and profile.hardware.gpus == 64 and (profile.hardware.gpu or "").startswith("MI300X"):
        a_step = PAPER_HOURS * 3600 / PAPER_STEPS
        lines.append(f"the paper: {PAPER_STEPS} steps in one week = {PAPER_HOURS:.0f} h, {a_step:.0f} s per step")
    hours, gpus = (seconds + sum(others.values())) / 3600, profile.hardware.gpus
    parts_h = {part: value / 3600 for part, value in others.items()}
    numbers = {"stages": stages, "parts_h": parts_h, "not_counted": missing, "hours": hours}
    return "; ".join(lines) + costs.note, numbers | {"gpus": gpus, "gpu_hours": hours * gpus}


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds / 60:.0f} min"


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
