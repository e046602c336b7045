"""Preflight's checks of the machine against the recipe: sandbox, memory, batches, disk, GPUs, versions, time."""

import asyncio
import os
import shutil
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.rl.preflight import estimate
from rstar_lab.rl.preflight.subject import Skip, Subject, Warn

# The paper's own figure, which estimates of its recipe are put beside: 510 steps on 64 MI300X in one week.
PAPER_STEPS, PAPER_HOURS = 510, 168.0


# The sandbox


def sandbox(subject: Subject) -> str:
    """Reachable, and fast enough for a step's calls while it generates."""
    section = subject.recipe.sandbox
    calls = max(
        rl.problems_per_step * rl.group_size * rl.oversample * estimate.CALLS_PER_ROLLOUT
        for rl in (subject.recipe.settings(stage) for stage in subject.recipe.stages)
    ) if subject.recipe.stages else 0  # fmt: skip
    hardware, settings = subject.profile.hardware, subject.profile.sandbox
    workers = (
        (section.workers or hardware.cpus_per_node)
        if section.url == "local"
        else settings.workers_per_node * hardware.nodes
    )
    if section.url != "local":
        try:
            seconds = asyncio.run(_probe_remote(section.url))
        except Exception as error:
            raise Skip(f"{section.url} cannot be reached from here ({type(error).__name__})") from error
    elif subject.profile.backend != "local":
        raise Skip(f"the sandbox of {subject.profile.name} runs on its nodes; it is asked for {calls:.0f} calls a step")
    else:
        seconds = asyncio.run(_probe_local(section))
    load = calls * seconds / max(1, workers)
    message = (
        f"{seconds * 1e3:.0f} ms a call; {calls:.0f} calls a step on {workers} workers keep them busy for {load:.0f} s"
    )
    if subject.profile.hardware.gpus:
        longest = max(
            estimate.step_time(subject.architecture, subject.recipe.settings(s), subject.profile).generation
            for s in subject.recipe.stages
        )
        if load > longest:
            raise UserError(
                f"{message}, longer than the generation of {longest:.0f} s: more workers (profile sandbox.workers_per_node)"
            )
    return message


async def _probe_local(section: Any) -> float:
    from rstar_lab.sandbox import Limits, LocalSandbox

    async with LocalSandbox(Limits(timeout_s=section.timeout_s, memory_mb=section.memory_mb), 1) as box:
        return await _probe(box)


async def _probe_remote(url: str) -> float:
    from rstar_lab.sandbox import SandboxClient

    async with SandboxClient(url, deadline_s=10.0) as box:
        return await _probe(box)


async def _probe(box: Any, count: int = 5) -> float:
    seconds = []
    for number in range(count):
        started = time.monotonic()
        result = await box.run(f"print({number} * 2)")
        seconds.append(time.monotonic() - started)
        if result.stdout.strip() != str(number * 2):
            raise UserError(f"sandbox: it answered {result.outcome} {result.stdout!r} instead of {number * 2}")
    return statistics.median(seconds)


# Memory, batches, disk


def gpu_memory(subject: Subject) -> str:
    """Weights, optimizer, longest micro-batch and KV cache against the HBM, in the stage with the longest responses."""
    profile = subject.on_gpus
    stages = [subject.recipe.settings(stage) for stage in subject.recipe.stages] or [subject.recipe.rl]
    rl = max(stages, key=lambda keys: keys.max_response_tokens)
    found = estimate.memory(subject.architecture, rl, profile)
    message = (
        f"training {found.training_peak:.0f} GB (state {found.training_state:.0f}), rollout {found.rollout_peak:.0f} GB of "
        f"{found.hbm:.0f} GB; KV cache {found.kv_tokens} tokens a replica = {found.kv_tokens // max(1, found.longest)} rollouts "
        f"of the longest {found.longest}"
    )
    if not found.fits:
        raise UserError(
            f"{message}: does not fit; larger engine.tensor_parallel or parallelism.sequence_parallel, smaller "
            "parallelism.tokens_per_gpu or engine.memory_utilization, or offload in the profile"
        )
    return message


def batches(subject: Subject) -> str:
    """problems x kept rollouts over ranks and mini-batches."""
    profile = subject.profile
    ranks = max(1, profile.hardware.gpus // profile.parallelism.sequence_parallel)
    if (
        profile.hardware.gpus % (profile.parallelism.sequence_parallel * profile.engine.tensor_parallel)
        and profile.hardware.gpus
    ):
        raise UserError(
            f"profile {profile.name}: {profile.hardware.gpus} GPUs cannot be cut by sequence_parallel "
            f"{profile.parallelism.sequence_parallel} and tensor_parallel {profile.engine.tensor_parallel}"
        )
    told = []
    for stage in subject.recipe.stages:
        rl = subject.recipe.settings(stage)
        kept = rl.group_size
        if rl.problems_per_step % rl.mini_batches:
            raise UserError(
                f"stages.{stage.name}: problems_per_step {rl.problems_per_step} / mini_batches {rl.mini_batches} is not whole"
            )
        mini = rl.problems_per_step // rl.mini_batches * kept
        if mini % ranks:
            raise UserError(f"stages.{stage.name}: a mini-batch of {mini} rollouts cannot be cut over {ranks} ranks")
        told.append(f"{stage.name}: {rl.problems_per_step} x {kept} = {rl.mini_batches} x {mini} over {ranks} ranks")
    return "; ".join(told) or "no stages"


def disk(subject: Subject) -> str:
    """Checkpoints and transcripts against the free space, or the profile's where the folder is not here."""
    checkpoints, store = estimate.disk_bytes(subject.architecture, subject.recipe)
    needed = (checkpoints + store) / estimate.GB
    folder = Path(subject.profile.storage.runs)
    here = subject.profile.backend == "local"
    if here:
        folder = subject.recipe.runs.absolute()
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free / estimate.GB
    else:
        free = subject.profile.hardware.disk_gb
    where = "free" if here else "by the profile"
    message = (
        f"checkpoints {checkpoints / estimate.GB:.1f} GB, run store {store / estimate.GB:.1f} GB; {free:.0f} GB {where}"
    )
    if needed > free:
        raise UserError(f"{message}: fewer rl.keep_checkpoints, rl.token_arrays: sampled, or another storage.runs")
    return message


# The machine


def gpu_variables(subject: Subject) -> str:
    """Variables that hide GPUs from each other's tools."""
    merged = {**os.environ, **subject.profile.env}
    hip, cuda, rocr = (merged.get(f"{kind}_VISIBLE_DEVICES") for kind in ("HIP", "CUDA", "ROCR"))
    if rocr is not None and (hip is not None or cuda is not None):
        raise UserError(
            "ROCR_VISIBLE_DEVICES is set together with HIP_ or CUDA_VISIBLE_DEVICES: verl refuses that; unset ROCR_VISIBLE_DEVICES"
        )
    if hip is not None and cuda is not None and hip != cuda:
        raise UserError(f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} differ: unset one")
    subject.on_gpus  # noqa: B018
    if "expandable_segments:True" in merged.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        raise UserError(
            "PYTORCH_CUDA_ALLOC_CONF has expandable_segments: vLLM's sleep mode cannot give memory back then; unset it"
        )
    return "no conflict"


def versions(subject: Subject) -> str:
    """What is installed against what was tested together."""
    wanted = ["torch", "transformers"] + (
        ["verl", "ray", "tensordict", "TransferQueue"] if subject.profile.trainer == "verl" else []
    )
    found = {}
    for package in wanted:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError as error:
            raise Skip(f"{package} is not installed here; the nodes' image has it") from error
    told = ", ".join(f"{name} {version}" for name, version in found.items())
    if subject.profile.trainer == "verl" and not found["verl"].startswith("0.9."):
        raise Warn(f"{told}: the adapters were tested with verl 0.9.1")
    return told


def devices(subject: Subject) -> str:
    """GPUs of this machine against the profile's."""
    profile = subject.on_gpus
    import torch

    if not torch.cuda.is_available():
        raise Skip("no GPU on this machine")
    here, memory_gb = torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory / estimate.GB
    if here < profile.hardware.gpus_per_node or memory_gb < 0.9 * profile.hardware.hbm_gb:
        raise UserError(
            f"{here} GPUs of {memory_gb:.0f} GB here, the profile says {profile.hardware.gpus_per_node} of {profile.hardware.hbm_gb:.0f} GB"
        )
    return f"{here} x {torch.cuda.get_device_name(0)}"


def duration(subject: Subject) -> str:
    """Seconds a step and hours in all, by estimate.FORMULA; beside the paper's week where the machine is the paper's."""
    profile = subject.on_gpus
    if not profile.hardware.hbm_tb_per_s or not profile.hardware.bf16_tflops:
        raise Skip(f"profile {profile.name} gives no peak rates")
    told, seconds, steps = [], 0.0, 0
    for stage in subject.recipe.stages:
        step = estimate.step_time(subject.architecture, subject.recipe.settings(stage), profile)
        parts = ", ".join(f"{name.replace('_', ' ')} {value:.0f}" for name, value in vars(step).items())
        told.append(f"{stage.name}: {step.total:.0f} s a step ({parts})")
        seconds += stage.steps * step.total
        steps += stage.steps
    message = f"{'; '.join(told)}; {steps} steps = {seconds / 3600:.0f} h"
    if steps == PAPER_STEPS and profile.hardware.gpus == 64 and (profile.hardware.gpu or "").startswith("MI300X"):
        a_step = PAPER_HOURS * 3600 / PAPER_STEPS
        message += f"; the paper: {PAPER_STEPS} steps in one week = {PAPER_HOURS:.0f} h, {a_step:.0f} s a step"
    return message
