"""Run the update of a recipe at full size on fake tensors: `rstar-lab preflight RECIPE --profile P --dry-run`.

The real code runs (`Learner.update` of the local trainer, verl's FSDP engine with our loss) for one micro-batch and one optimizer
step, with the gradients of earlier micro-batches in memory. Training state, gradients and collectives are exact. Not included:
contexts, buffers of NCCL, workspaces and fragmentation of the allocator; `with_margin_gb` adds 8% and 1 GB (several ranks: 3 GB).
Times are bounds: every kernel at the peak rate of the GPU.
"""

import itertools
import json
import logging
import math
import resource
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import Profile, load_profile
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.preflight import dry_run_local, estimate
from rstar_lab.rl.preflight.context import Architecture, architecture_of
from rstar_lab.rl.preflight.dry_run_meter import Meter, Rates
from rstar_lab.rl.recipe import LimitsSection, Recipe, RlSection, Stage
from rstar_lab.untrusted.text import counted

GB = estimate.GB
SWEPT = ("micro_batch_tokens", "fsdp_size", "sequence_parallel")
MEAN_CONVERSATION = 1024  # tokens of a conversation of SFT


@dataclass(frozen=True)
class DryRun:
    """The result for SFT or one RL stage, per rank.

    Attributes:
        name: `sft` or the name of the stage.
        trainer: local or verl.
        ranks: number of GPUs.
        micro_batch_tokens: tokens of a micro-batch, of all GPUs that share a sequence.
        peak_gb: the largest memory of training.
        with_margin_gb: peak with an allowance for what a dry run cannot see.
        engine_gb: memory of the engine: of the local trainer beside the update; under verl during generation, with the parameters
            and moments that are not offloaded.
        fits: whether both fit into the GPU, where they hold memory at the same time together.
        phases: by phase of the update: memory in GB in total and by kind, largest storage, kernels, and roofline seconds.
        flops: FLOPs of a micro-batch on one rank, recomputation included.
        seconds: roofline seconds of a micro-batch by class of kernel.
        kernels_per_step: kernels of one update on one rank.
        collectives: of a micro-batch and the optimizer step: name, ranks of the group, number, GB, and seconds at the profile's
            link rates.
        update_s: lower bound of the update of a step.
        mfu_bound: model FLOPs over peak FLOPs in this time.
        wall_s, host_gb: what the dry run took.
    """

    name: str
    trainer: str
    ranks: int
    micro_batch_tokens: int
    peak_gb: float
    with_margin_gb: float
    engine_gb: float
    fits: bool
    largest: str
    phases: dict[str, dict[str, Any]]
    flops: float
    seconds: dict[str, float]
    kernels_per_step: int
    micro_batches: int
    collectives: list[dict[str, Any]]
    update_s: float
    mfu_bound: float
    wall_s: float
    host_gb: float


def dry_run(recipe: Recipe, profile: Profile) -> Iterator[DryRun]:
    """Yield the result of each stage and of SFT. Stages that differ only in the length of responses share one run.

    Raises:
        UserError: the shape of the model is unknown, or the profile has no GPU.
    """
    shape = _shape(recipe, profile)
    done: list[tuple[RlSection, int]] = []
    for stage in recipe.stages:
        rl = recipe.settings(stage)
        key = (rl.model_copy(update={"limits": LimitsSection(), "warmup_steps": 0}), _micro_batch_tokens(rl, profile))
        if key not in done:
            done.append(key)
            yield run_stage(recipe, stage, profile, shape)
    if recipe.sft is not None:
        yield run_sft(recipe, profile, shape)


def run_stage(recipe: Recipe, stage: Stage, profile: Profile, shape: Architecture) -> DryRun:
    """Run one update of a stage."""
    started, rl, meter = time.monotonic(), recipe.settings(stage), _meter(profile, shape)
    typical = estimate.PROMPT_TOKENS + estimate.MEAN_RESPONSE_SHARE * rl.limits.max_response_tokens
    micro = _micro_batch_tokens(rl, profile)
    rows, width = dry_run_local.rows_of(micro, typical)
    if profile.trainer == "local":
        dry_run_local.run_update(recipe, rl, shape, rows, width, meter)
    else:
        config = dry_run_local.model_config(recipe.model, shape)
        with _verl() as verl:
            verl.run_stage(recipe, stage, profile, config, _lengths(micro, rows), meter)
    tokens = rl.problems_per_step * rl.group_size * typical
    steps = rl.mini_batches
    return _result(stage.name, recipe, profile, shape, meter, (rows, width), tokens, steps, started)


def run_sft(recipe: Recipe, profile: Profile, shape: Architecture) -> DryRun:
    """Run one step of SFT."""
    assert recipe.sft is not None
    started, meter, sft = time.monotonic(), _meter(profile, shape), recipe.sft
    if profile.trainer == "local":
        tokens = max(sft.micro_batch_tokens, sft.max_tokens)
    else:
        parallel = profile.parallelism
        tokens = (
            max(parallel.tokens_per_gpu, -(-sft.max_tokens // parallel.sequence_parallel)) * parallel.sequence_parallel
        )
    rows, width = dry_run_local.rows_of(tokens, MEAN_CONVERSATION)
    if profile.trainer == "local":
        dry_run_local.run_sft(recipe, shape, rows, width, meter)
    else:
        config = dry_run_local.model_config(recipe.model, shape)
        with _verl() as verl:
            verl.run_sft(recipe, profile, config, _lengths(tokens, rows), meter)
    batch = sft.batch_size * MEAN_CONVERSATION
    return _result("sft", recipe, profile, shape, meter, (rows, width), batch, 1, started)


@contextmanager
def _verl() -> Iterator[Any]:
    """Yield the module that runs verl's engine, without verl's warnings about accelerators and engines that are not installed."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from rstar_lab.rl.verl import dry_run as module

            yield module
    finally:
        logging.disable(disabled)


def _lengths(tokens: int, rows: int) -> list[int]:
    """Return the lengths of sequences that fill a micro-batch."""
    return [tokens // rows] * (rows - 1) + [tokens - tokens // rows * (rows - 1)]


def _shape(recipe: Recipe, profile: Profile) -> Architecture:
    if not (profile.hardware.gpus and profile.hardware.bf16_tflops and profile.hardware.hbm_tb_per_s):
        raise UserError(f"--dry-run: profile {profile.name} has no GPU with peak rates (bf16_tflops, hbm_tb_per_s)")
    shape = architecture_of(recipe.model)
    if shape is None:
        raise UserError(f"model: the shape of {recipe.model} is unknown; set model to a folder with a config.json")
    if profile.trainer == "local" and shape.experts:
        raise UserError("--dry-run: the kernels of experts in fp32 have no fake version; use a profile with verl")
    parallel = profile.parallelism.sequence_parallel
    if profile.trainer == "verl" and shape.heads % parallel:
        raise UserError(
            f"parallelism.sequence_parallel: {parallel} in profile {profile.name} does not divide the {shape.heads} attention "
            f"heads of {recipe.model}"
        )
    return shape


def _meter(profile: Profile, shape: Architecture) -> Meter:
    hardware = profile.hardware
    rates = Rates((hardware.bf16_tflops or 0) * 1e12, (hardware.hbm_tb_per_s or 0) * 1e12)
    return Meter(rates, shape.vocabulary, max(1, hardware.gpus_per_node))


def _micro_batch_tokens(rl: RlSection, profile: Profile) -> int:
    """Return the tokens of a micro-batch: at least the longest sequence, and split over `sequence_parallel` GPUs."""
    longest = estimate.LONGEST_PROMPT_TOKENS + rl.limits.max_response_tokens
    if profile.trainer == "local":
        return max(rl.micro_batch_tokens, longest)
    parallel = profile.parallelism
    return max(parallel.tokens_per_gpu, -(-longest // parallel.sequence_parallel)) * parallel.sequence_parallel


def _result(
    name: str,
    recipe: Recipe,
    profile: Profile,
    shape: Architecture,
    meter: Meter,
    rows: tuple[int, int],
    step_tokens: float,
    optimizer_steps: int,
    started: float,
) -> DryRun:
    hardware, measured = profile.hardware, profile.measured
    ranks = hardware.gpus if profile.trainer == "verl" else 1
    shared = profile.parallelism.sequence_parallel if profile.trainer == "verl" else 1
    tokens = rows[0] * rows[1]
    micro_batches = max(optimizer_steps, math.ceil(step_tokens / (tokens * ranks / shared)))
    peak = max(meter.peaks.values(), key=lambda phase: phase.total)
    peak_gb = peak.total / GB
    with_margin = 1.08 * peak_gb + (3 if ranks > 1 else 1)
    engine_gb, fits = 0.0, with_margin <= hardware.hbm_gb
    if name != "sft" and profile.trainer == "local":
        engine_gb = recipe.engine.gpu_memory_utilization * hardware.hbm_gb
        fits = with_margin + engine_gb <= hardware.hbm_gb
    elif name != "sft":
        parallel = profile.parallelism
        state = {"parameters": parallel.offload_params, "moments": parallel.offload_optimizer}
        held = sum(meter.peaks["optimizer"].by_kind.get(kind, 0) for kind, is_away in state.items() if not is_away)
        engine_gb = profile.engine.memory_utilization * hardware.hbm_gb + held / GB
        fits = fits and engine_gb <= hardware.hbm_gb
    collectives, communication = [], {"micro_batch": 0.0, "optimizer": 0.0}
    for key, count in meter.collectives.items():
        rate = (measured.link_gb_per_s if key.inside else measured.network_gb_per_s) * GB
        seconds = key.moved(meter.collective_bytes[key]) / rate
        communication["optimizer" if key.phase == "optimizer" else "micro_batch"] += seconds
        gb = meter.collective_bytes[key] / GB
        collectives.append(key._asdict() | {"count": count, "gb": gb, "seconds": seconds})
    compute = meter.phase_seconds["forward"] + meter.phase_seconds["backward"]
    exposed = max(compute, communication["micro_batch"])
    update = micro_batches * exposed + optimizer_steps * (meter.phase_seconds["optimizer"] + communication["optimizer"])
    model_flops = 3 * shape.forward_flops(micro_batches * tokens / shared, rows[1])
    kernels = micro_batches * (meter.phase_kernels["forward"] + meter.phase_kernels["backward"])
    phases: dict[str, dict[str, Any]] = {
        str(phase): {
            "total_gb": found.total / GB,
            "by_kind_gb": {kind: size / GB for kind, size in sorted(found.by_kind.items(), key=lambda one: -one[1])},
            "largest": found.largest,
            "largest_gb": found.largest_bytes / GB,
            "kernels": meter.phase_kernels[phase],
            "seconds": meter.phase_seconds[phase],
        }
        for phase, found in meter.peaks.items()
        if phase != "idle"
    }
    by_class = dict(sorted(meter.seconds.items(), key=lambda one: -one[1]))
    return DryRun(
        name, profile.trainer, ranks, tokens, peak_gb, with_margin, engine_gb, fits,
        f"{peak.largest}, {peak.largest_bytes / GB:.2f} GB", phases, float(meter.flops), by_class,
        kernels + optimizer_steps * meter.phase_kernels["optimizer"], micro_batches, collectives, update,
        model_flops / (update * (hardware.bf16_tflops or 0) * 1e12), time.monotonic() - started,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    )  # fmt: skip


# Sweeps


def sweep(recipe: Recipe, profile: Profile, keys: list[str]) -> Iterator[tuple[dict[str, int], DryRun]]:
    """Yield (values of the keys, result of the first stage) for combinations around the configured values.

    Raises:
        UserError: an unknown key, or one that the profile's trainer does not have.
    """
    shape = _shape(recipe, profile)
    for key in keys:
        if key not in SWEPT or (profile.trainer == "local" and key != "micro_batch_tokens"):
            known = ", ".join(SWEPT if profile.trainer == "verl" else SWEPT[:1])
            raise UserError(f"--sweep {key}: the {profile.trainer} trainer has {known}")
    for values in itertools.product(*(_choices(key, recipe, profile, shape) for key in keys)):
        chosen = dict(zip(keys, values, strict=True))
        stage = recipe.stages[0]
        if "micro_batch_tokens" in chosen and profile.trainer == "local":
            stage = stage.model_copy(update={"rl": stage.rl | {"micro_batch_tokens": chosen["micro_batch_tokens"]}})
        changes = {name.replace("micro_batch_tokens", "tokens_per_gpu"): value for name, value in chosen.items()}
        parallel = profile.parallelism.model_copy(update=changes if profile.trainer == "verl" else {})
        yield chosen, run_stage(recipe, stage, profile.model_copy(update={"parallelism": parallel}), shape)


def _choices(key: str, recipe: Recipe, profile: Profile, shape: Architecture) -> list[int]:
    gpus, node = profile.hardware.gpus, profile.hardware.gpus_per_node
    if key == "fsdp_size":
        return sorted({node, gpus})
    if key == "sequence_parallel":
        return [size for size in (1, 2, 4, 8) if shape.heads % size == 0 and node % size == 0]
    now = profile.parallelism.tokens_per_gpu
    if profile.trainer == "local":
        now = recipe.settings(recipe.stages[0]).micro_batch_tokens
    return [now // 2, now, 2 * now]


def recommended(results: list[tuple[dict[str, int], DryRun]]) -> dict[str, int] | None:
    """Return the values with the shortest update among those that fit; None if nothing fits."""
    fitting = [(result.update_s, index) for index, (_, result) in enumerate(results) if result.fits]
    return results[min(fitting)[1]][0] if fitting else None


# Output


def dry_run_rows(recipe: Recipe, profile: Profile, sweep_keys: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the results as rows of JSON, also for the figures of `rstar_lab.analysis.dry_run_figures`.

    Without `sweep_keys`, a row per stage and one for SFT. With it, a row per combination of values, in which `sweep` holds
    the values, and last a row with the key `recommended`.
    """
    if sweep_keys is None:
        yield from ({"dry_run": result.name} | vars(result) for result in dry_run(recipe, profile))
        return
    results = []
    for values, result in sweep(recipe, profile, sweep_keys):
        results.append((values, result))
        yield {"dry_run": result.name} | vars(result) | values | {"sweep": values}
    yield {"recommended": recommended(results)}


def run_dry_run(
    recipe: str,
    profile: str,
    overrides: Mapping[str, Any],
    *,
    trainer: str | None,
    sweep_keys: str | None,
    as_json: bool,
) -> int:
    """Print the results as text, or as one JSON object per line. Returns 1 if a result does not fit, or no
    result of a sweep."""
    loaded_profile = load_profile(profile)
    if trainer:
        loaded_profile = loaded_profile.model_copy(update={"trainer": trainer})
    loaded = load_recipe(recipe, overrides, loaded_profile)
    keys = None if sweep_keys is None else [key.strip() for key in sweep_keys.split(",")]
    fits = True
    for number, row in enumerate(dry_run_rows(loaded, loaded_profile, keys)):
        if "recommended" in row:
            fits = row["recommended"] is not None
        elif keys is None:
            fits &= row["fits"]
        print(json.dumps(row) if as_json else "\n".join(_text(row, keys, number)), flush=True)
    return 0 if fits else 1


def _text(row: dict[str, Any], keys: list[str] | None, number: int) -> Iterator[str]:
    if "recommended" in row:
        best = row["recommended"]
        chosen = ", ".join(f"{key} {value}" for key, value in best.items()) if best else "nothing fits"
        yield f"recommended: {chosen}" + (" (the shortest update of those that fit)" if best else "")
    elif keys is None:
        yield from text_lines(DryRun(**{name: value for name, value in row.items() if name != "dry_run"}))
    else:
        heads = [*keys, "peak GB", "with margin GB", "fits", "update s", "MFU"]
        if number == 0:
            yield "  ".join(heads)
        cells = [row[key] for key in keys] + [
            f"{row['peak_gb']:.1f}", f"{row['with_margin_gb']:.1f}", "yes" if row["fits"] else "no",
            f"{row['update_s']:.1f}", f"{row['mfu_bound']:.0%}",
        ]  # fmt: skip
        yield "  ".join(f"{cell!s:>{len(head)}}" for cell, head in zip(cells, heads, strict=True))


def _summary(result: DryRun) -> str:
    fits = "fits" if result.fits else "does not fit"
    return (
        f"peak {result.peak_gb:.1f} GB per rank, with margin {result.with_margin_gb:.1f} GB, engine {result.engine_gb:.1f} GB "
        f"({fits}); "
        f"update at least {result.update_s:.1f} s, MFU at most {result.mfu_bound:.0%}"
    )


def text_lines(result: DryRun) -> list[str]:
    """Return the result as lines of text."""
    lines = [
        f"{result.name} ({result.trainer}, {counted(result.ranks, 'rank')}, {result.micro_batch_tokens} tokens): {_summary(result)}"
    ]
    for phase, found in result.phases.items():
        kinds = ", ".join(f"{kind} {gb:.2f}" for kind, gb in found["by_kind_gb"].items() if gb >= 0.005)
        lines.append(
            f"  {phase}: {found['total_gb']:.1f} GB ({kinds}); {found['kernels']} kernels, {found['seconds']:.2f} s; "
            f"largest: {found['largest']} {found['largest_gb']:.2f} GB"
        )
    total = sum(result.seconds.values())
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in result.seconds.items())
    lines.append(f"  time by kernel at peak rates: {shares}; {result.flops / 1e12:.0f} TFLOP per micro-batch")
    lines.append(
        f"  {counted(result.micro_batches, 'micro-batch')} and {result.kernels_per_step} kernels per step and rank"
    )
    for one in result.collectives:
        place = "inside a node" if one["inside"] else "between nodes"
        lines.append(
            f"  {one['phase']}: {one['count']} x {one['name']} over {counted(one['ranks'], 'rank')} {place}, {one['gb']:.1f} GB, "
            f"{one['seconds']:.2f} s"
        )
    lines.append(
        "  not included: GPU context, NCCL buffers, workspaces, fragmentation (the margin is 8% and "
        f"{3 if result.ranks > 1 else 1} GB); this dry run took {result.wall_s:.0f} s and {result.host_gb:.1f} GB"
    )
    return lines
