"""Run the update of a recipe at full size on fake tensors: `rstar-lab preflight RECIPE --profile P --dry-run`.

The real code runs (`Learner.update` of the local trainer, verl's FSDP engine with our loss) for one micro-batch and one optimizer
step, with the gradients of earlier micro-batches in memory. Training state, gradients and collectives are exact. Not included:
contexts, buffers of NCCL, workspaces and fragmentation of the allocator; `with_margin_gb` adds 8% and 1 GB (several ranks: 3 GB).
Times are bounds: every kernel at the peak rate of the GPU.
"""

import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.dry_run import local
from rstar_lab.dry_run.meter import Collective, Meter
from rstar_lab.hardware.profiles import Profile, load_profile
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.preflight import estimate
from rstar_lab.rl.preflight.context import Architecture, architecture_of
from rstar_lab.rl.recipe import LimitsSection, Recipe, RlSection, Stage
from rstar_lab.untrusted.text import counted

GB = estimate.GB
MEAN_CONVERSATION = 1024  # tokens of a conversation of SFT


Row = dict[str, Any]


def dry_run_rows(recipe: Recipe, profile: Profile) -> Iterator[Row]:
    """Yield a row of JSON values, per rank, for each stage and for SFT. Stages that differ only in the length of responses share one run.

    | key | value |
    |---|---|
    | `dry_run`, `name` | `sft` or the name of the stage |
    | `trainer`, `ranks` | local or verl; number of GPUs |
    | `micro_batch_tokens` | tokens of a micro-batch, of all GPUs that share a sequence |
    | `peak_gb`, `with_margin_gb` | the largest memory of training; with an allowance for what a dry run cannot see |
    | `engine_gb` | memory of the engine; under verl during generation, with the parameters and moments that are not offloaded |
    | `fits` | whether both fit into the GPU, where they hold memory at the same time together |
    | `phases` | by phase of the update: memory in GB in total and by kind, largest storage, kernels, and roofline seconds |
    | `flops`, `seconds` | of a micro-batch on one rank, recomputation included; roofline seconds by class of kernel |
    | `kernels_per_step`, `micro_batches` | of one update on one rank |
    | `collectives` | of a micro-batch and the optimizer step: name, ranks of its group, number, GB, and seconds at the profile's rates |
    | `update_s`, `mfu_bound` | lower bound of the update of a step, and model FLOPs over peak FLOPs in this time |

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


def run_stage(recipe: Recipe, stage: Stage, profile: Profile, shape: Architecture) -> Row:
    """Run one update of a stage."""
    rl, meter = recipe.settings(stage), _meter(profile, shape)
    typical = estimate.PROMPT_TOKENS + estimate.MEAN_RESPONSE_SHARE * rl.limits.max_response_tokens
    micro = _micro_batch_tokens(rl, profile)
    rows, width = local.rows_of(micro, typical)
    if profile.trainer == "local":
        local.run_update(recipe, rl, shape, rows, width, meter)
    else:
        with _verl() as verl:
            config = local.model_config(recipe.model, shape)
            verl.run_stage(recipe, stage, profile, config, _lengths(micro, rows), meter)
    tokens = rl.problems_per_step * rl.group_size * typical
    return _result(stage.name, recipe, profile, shape, meter, (rows, width), tokens, rl.mini_batches)


def run_sft(recipe: Recipe, profile: Profile, shape: Architecture) -> Row:
    """Run one step of SFT."""
    assert recipe.sft is not None
    meter, sft = _meter(profile, shape), recipe.sft
    if profile.trainer == "local":
        tokens = max(sft.micro_batch_tokens, sft.max_tokens)
        rows, width = local.rows_of(tokens, MEAN_CONVERSATION)
        local.run_sft(recipe, shape, rows, width, meter)
    else:
        tokens = _tokens_of_sequence_group(sft.max_tokens, profile)
        rows, width = local.rows_of(tokens, MEAN_CONVERSATION)
        with _verl() as verl:
            config = local.model_config(recipe.model, shape)
            verl.run_sft(recipe, profile, config, _lengths(tokens, rows), meter)
    return _result("sft", recipe, profile, shape, meter, (rows, width), sft.batch_size * MEAN_CONVERSATION, 1)


@contextmanager
def _verl() -> Iterator[Any]:
    """Yield the module that runs verl's engine, without verl's warnings about accelerators and engines that are not installed."""
    with warnings.catch_warnings(action="ignore"), ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        from rstar_lab.dry_run import verl_engine

        yield verl_engine


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
    rates = ((hardware.bf16_tflops or 0) * 1e12, (hardware.hbm_tb_per_s or 0) * 1e12)
    return Meter(rates, shape.vocabulary, max(1, hardware.gpus_per_node))


def _micro_batch_tokens(rl: RlSection, profile: Profile) -> int:
    """Return the tokens of a micro-batch: at least the longest sequence, and split over `sequence_parallel` GPUs."""
    longest = estimate.LONGEST_PROMPT_TOKENS + rl.limits.max_response_tokens
    if profile.trainer == "local":
        return max(rl.micro_batch_tokens, longest)
    return _tokens_of_sequence_group(longest, profile)


def _tokens_of_sequence_group(longest: int, profile: Profile) -> int:
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
) -> Row:
    hardware, parallel = profile.hardware, profile.parallelism
    under_verl = profile.trainer == "verl"
    ranks, shared = (hardware.gpus, parallel.sequence_parallel) if under_verl else (1, 1)
    tokens = rows[0] * rows[1]
    micro_batches = max(optimizer_steps, math.ceil(step_tokens / (tokens * ranks / shared)))
    peak_gb = max(phase.total for phase in meter.peaks.values()) / GB
    with_margin = 1.08 * peak_gb + _margin_gb(ranks)
    engine_gb = held_beside = 0.0
    if name != "sft" and under_verl:
        state = {"parameters": parallel.offload_params, "moments": parallel.offload_optimizer}
        held = sum(meter.peaks["optimizer"].by_kind.get(kind, 0) for kind, is_away in state.items() if not is_away)
        engine_gb = profile.engine.memory_utilization * hardware.hbm_gb + held / GB
    elif name != "sft":
        engine_gb = held_beside = recipe.engine.gpu_memory_utilization * hardware.hbm_gb
    collectives = [_collective(key, count, meter, profile) for key, count in meter.collectives.items()]
    last = sum(one["seconds"] for one in collectives if one["phase"] == "optimizer")
    overlapping = sum(one["seconds"] for one in collectives) - last
    compute = meter.phase_seconds["forward"] + meter.phase_seconds["backward"]
    update = micro_batches * max(compute, overlapping) + optimizer_steps * (meter.phase_seconds["optimizer"] + last)
    kernels = micro_batches * (meter.phase_kernels["forward"] + meter.phase_kernels["backward"])
    phases: dict[str, Row] = {
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
    return {
        "dry_run": name, "name": name, "trainer": profile.trainer, "ranks": ranks, "micro_batch_tokens": tokens, "peak_gb": peak_gb,
        "with_margin_gb": with_margin, "engine_gb": engine_gb, "fits": max(with_margin + held_beside, engine_gb) <= hardware.hbm_gb,
        "phases": phases, "flops": float(meter.flops), "seconds": dict(sorted(meter.seconds.items(), key=lambda one: -one[1])),
        "kernels_per_step": kernels + optimizer_steps * meter.phase_kernels["optimizer"], "micro_batches": micro_batches,
        "collectives": collectives, "update_s": update,
        "mfu_bound": 3 * shape.forward_flops(micro_batches * tokens / shared, rows[1]) / (update * meter.peak_flops),
    }  # fmt: skip


def _margin_gb(ranks: int) -> int:
    return 3 if ranks > 1 else 1


def _collective(key: Collective, count: int, meter: Meter, profile: Profile) -> Row:
    measured, size = profile.measured, meter.collective_bytes[key]
    rate = (measured.link_gb_per_s if key.inside else measured.network_gb_per_s) * GB
    return key._asdict() | {"count": count, "gb": size / GB, "seconds": key.moved(size) / rate}


def run_dry_run(recipe: str, profile: str, overrides: Mapping[str, Any], *, trainer: str | None, as_json: bool) -> int:
    """Print the results as text, or as one JSON object per line. Returns 1 if a result does not fit."""
    machine = load_profile(profile)
    machine = machine.model_copy(update={"trainer": trainer or machine.trainer})
    fits = True
    for row in dry_run_rows(load_recipe(recipe, overrides, machine), machine):
        fits &= row["fits"]
        print(json.dumps(row) if as_json else "\n".join(_text(row)), flush=True)
    return 0 if fits else 1


def _text(row: Row) -> Iterator[str]:
    """Yield the lines of text of a row."""
    yield (
        f"{row['name']} ({row['trainer']}, {counted(row['ranks'], 'rank')}, {row['micro_batch_tokens']} tokens): "
        f"peak {row['peak_gb']:.1f} GB per rank, with margin {row['with_margin_gb']:.1f} GB, engine {row['engine_gb']:.1f} GB "
        f"({'fits' if row['fits'] else 'does not fit'}); update at least {row['update_s']:.1f} s, MFU at most {row['mfu_bound']:.0%}"
    )
    for phase, found in row["phases"].items():
        kinds = ", ".join(f"{kind} {gb:.2f}" for kind, gb in found["by_kind_gb"].items() if gb >= 0.005)
        yield (
            f"  {phase}: {found['total_gb']:.1f} GB ({kinds}); {found['kernels']} kernels, {found['seconds']:.2f} s; "
            f"largest: {found['largest']} {found['largest_gb']:.2f} GB"
        )
    total = sum(row["seconds"].values())
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in row["seconds"].items())
    yield f"  time by kernel at peak rates: {shares}; {row['flops'] / 1e12:.0f} TFLOP per micro-batch"
    yield f"  {counted(row['micro_batches'], 'micro-batch')} and {row['kernels_per_step']} kernels per step and rank"
    for one in row["collectives"]:
        yield (
            f"  {one['phase']}: {one['count']} x {one['name']} over {counted(one['ranks'], 'rank')} "
            f"{'inside a node' if one['inside'] else 'between nodes'}, {one['gb']:.1f} GB, {one['seconds']:.2f} s"
        )
    yield (
        "  not included: GPU context, NCCL buffers, workspaces, fragmentation (the margin is 8% and "
        f"{_margin_gb(row['ranks'])} GB)"
    )
