"""Estimates for a profile without GPUs: memory of training and engines, and time from the measured speed of this machine."""

import time

from rstar_lab.rl.preflight import estimate
from rstar_lab.rl.preflight.context import Architecture, CheckContext, NotNeeded, Warn
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.recipe.sft import Lora
from rstar_lab.untrusted.text import counted

# Prompt of the paper's format with its tool schema, and mean length of a generated SFT conversation without its system prompt,
# which is computed once for several conversations.
PROMPT_TOKENS, CONVERSATION_TOKENS = 450, 240
# Share of the rate of a matrix product that a whole pass reaches. SFT of SmolLM2-135M takes 3 ms of
# CPU time per token in bf16 and 10 ms in float32; generation reads all weights for few tokens.
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
        f"micro-batch {recipe.processes * ACTIVATIONS / estimate.GB:.1f} GB, {counted(engines, 'engine')} {rollouts / estimate.GB:.1f} GB"
    )
    if peak > available * estimate.GB:
        raise Warn(
            f"{message}: does not fit; set engine.count=1, processes=1, rl.lora and sft.lora, or engine.kv_cache_gb"
        )
    return message


def costs(context: CheckContext) -> estimate.Costs:
    """Return costs from the speed of a matrix product on this machine."""
    recipe, parameters, rate = context.recipe, _shape(context).parameters, _matrix_rate()
    training, generation = rate * TRAINING_SHARE / 6, rate * GENERATION_SHARE / 2  # parameters x tokens per second

    def sft(conversations: int) -> float:
        assert recipe.sft is not None
        return recipe.sft.epochs * conversations * CONVERSATION_TOKENS * parameters / training

    def generate(rollouts: int, limit: int) -> float:
        return rollouts * estimate.MEAN_RESPONSE_SHARE * limit * parameters / generation

    def step(rl: RlSection) -> tuple[float, str]:
        kept, limit = rl.problems_per_step * rl.group_size, rl.limits.max_response_tokens
        sampled = generate(int(kept * rl.method.roc.oversample), limit)
        # The rows of a group hold its prompt about twice; most steps keep all rollouts.
        tokens = kept * estimate.MEAN_RESPONSE_SHARE * limit + 2 * rl.problems_per_step * PROMPT_TOKENS
        update = tokens * parameters / training
        return sampled + update, f"generate {sampled:.0f}, update {update:.0f}"

    return estimate.Costs(step, sft, generate, f" ({rate / 1e9:.0f} GFLOP/s measured now, on this machine)")


def _shape(context: CheckContext) -> Architecture:
    if context.recipe.model == "tiny":
        raise NotNeeded("the tiny model needs less than 8 GB and no GPU")
    return context.architecture


def _state(model: Architecture, lora: Lora | None) -> float:
    """Return the bytes of weights, gradients and moments in float32; with adapters only those of the adapters are trained."""
    if lora is None:
        return estimate.STATE_BYTES * model.parameters
    return 4 * model.parameters + estimate.STATE_BYTES * estimate.lora_parameters(model, lora)


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
