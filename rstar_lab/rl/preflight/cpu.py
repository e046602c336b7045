"""Estimates for a profile without GPUs: memory of training and engines, and time from the measured speed of this machine."""

import time
from typing import Any

from rstar_lab.rl.preflight import estimate
from rstar_lab.rl.preflight.architecture import Architecture
from rstar_lab.rl.preflight.context import CheckContext, NotNeeded, Warn
from rstar_lab.rl.recipe import Recipe
from rstar_lab.rl.recipe.lora import Lora

# Prompt of the paper's format with its tool schema, and mean length of a generated SFT conversation.
PROMPT_TOKENS, CONVERSATION_TOKENS = 450, 440
# Share of the rate of a matrix product that a whole pass reaches. SFT of SmolLM2-135M takes 7 ms of
# CPU time per token in bf16 and 11 ms in float32; generation reads all weights for few tokens.
TRAINING_SHARE, GENERATION_SHARE = 0.5, 0.2
ACTIVATIONS = 2 * 2**30  # limit of a micro-batch of SFT


def memory(context: CheckContext) -> str:
    """Estimate the peak memory of SFT and RL. Raises Warn if it exceeds the memory of the profile."""
    recipe, model = context.recipe, _shape(context)
    engines = recipe.engine.count or min(4, context.profile.hardware.cpus_per_node)
    if recipe.engine.kind == "server":
        engines = 0
    elif recipe.engine.kind == "transformers":
        engines = 1
    weights = model.parameters * (4 if recipe.engine.dtype == "float32" else 2)
    rollouts = engines * (weights + (recipe.engine.kv_cache_gb or 1.0) * estimate.GB + 0.6 * estimate.GB)
    training = {"RL": _state(model, recipe.rl.lora) if recipe.stages else 0.0}
    if recipe.sft is not None:
        training["SFT"] = _state(model, recipe.sft.lora)
    name, state = max(training.items(), key=lambda item: item[1])
    peak = recipe.processes * (state + ACTIVATIONS) + rollouts
    available = context.profile.hardware.memory_gb_per_node
    message = (
        f"about {peak / estimate.GB:.1f} GB of {available:.0f} GB: {name} {recipe.processes * state / estimate.GB:.1f} GB, "
        f"micro-batch {recipe.processes * ACTIVATIONS / estimate.GB:.1f} GB, {engines} engines {rollouts / estimate.GB:.1f} GB"
    )
    if peak > available * estimate.GB:
        raise Warn(
            f"{message}: does not fit; set engine.count=1, processes=1, rl.lora and sft.lora, or engine.kv_cache_gb"
        )
    return message


def duration(context: CheckContext) -> tuple[str, dict[str, Any]]:
    """Estimate the time of SFT, steps and evaluations from the speed of a matrix product on this machine."""
    recipe, model = context.recipe, _shape(context)
    rate = _matrix_rate()
    training, generation = rate * TRAINING_SHARE / 6, rate * GENERATION_SHARE / 2  # parameters x tokens per second
    parts, total = [], 0.0
    if recipe.sft is not None:
        synthetic = recipe.sft.problems.synthetic if recipe.sft.problems else None
        count = (synthetic.count if synthetic else 0) + sum(entry.count or 0 for entry in recipe.sft.conversations)
        seconds = recipe.sft.epochs * count * CONVERSATION_TOKENS * model.parameters / training
        parts.append(f"SFT {seconds / 60:.0f} min")
        total += seconds
    stages = []
    for stage in recipe.stages:
        rl = recipe.settings(stage)
        kept = rl.problems_per_step * rl.group_size
        response = estimate.MEAN_RESPONSE_SHARE * rl.limits.max_response_tokens
        sampled = kept * rl.method.roc.oversample * response * model.parameters / generation
        # The rows of a group hold its prompt about twice; most steps keep all rollouts.
        update = (kept * response + 2 * rl.problems_per_step * PROMPT_TOKENS) * model.parameters / training
        parts.append(f"{stage.name}: {sampled + update:.0f} s per step (generate {sampled:.0f}, update {update:.0f})")
        stages.append({"name": stage.name, "steps": stage.steps, "step_s": sampled + update})
        total += stage.steps * (sampled + update)
    evaluated = _evaluated_tokens(recipe) * model.parameters / generation
    if evaluated:
        parts.append(f"evaluations {evaluated / 60:.0f} min")
    total += evaluated
    message = f"about {total / 60:.0f} min: {'; '.join(parts)} ({rate / 1e9:.0f} GFLOP/s measured now, on this machine)"
    return message, {"stages": stages, "hours": total / 3600, "gpus": 0, "gpu_hours": 0.0}


def _shape(context: CheckContext) -> Architecture:
    if context.recipe.model == "tiny":
        raise NotNeeded("the tiny model needs less than 8 GB and no GPU")
    return context.architecture


def _state(model: Architecture, lora: Lora | None) -> float:
    """Return the bytes of weights, gradients and moments in float32; with adapters only those of the adapters are trained."""
    if lora is None:
        return estimate.STATE_BYTES * model.parameters
    return 4 * model.parameters + estimate.STATE_BYTES * estimate.lora_parameters(model, lora)


def _evaluated_tokens(recipe: Recipe) -> float:
    """Return the tokens of the evaluations of all models of a recipe: before training, after SFT and after each stage."""
    models = 1 + (recipe.sft is not None) + len(recipe.stages)
    problems = sum(estimate.problem_count(section) for section in recipe.evaluate.sets.values())
    return (
        models * problems * recipe.evaluate.samples * estimate.MEAN_RESPONSE_SHARE * recipe.evaluate.max_response_tokens
    )


def _matrix_rate() -> float:
    """Measure the floating-point operations per second of a matrix product, with all threads and `precision: auto`."""
    import torch

    from rstar_lab.rl.models.model import has_bf16

    dtype = torch.bfloat16 if has_bf16(torch.device("cpu")) else torch.float32
    states, weights = torch.ones(1024, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    best = float("inf")
    for _ in range(5):  # the first prepares the kernel
        started = time.perf_counter()
        torch.nn.functional.linear(states, weights)
        best = min(best, time.perf_counter() - started)
    return 2 * 1024**3 / best
