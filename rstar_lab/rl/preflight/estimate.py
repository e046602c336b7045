"""Estimate the memory, step time and disk space of a recipe. These are formulas, not measurements.

Units: bytes, seconds, tokens. Peak rates and efficiencies come from the hardware profile; every formula is in a docstring.
`benchmarks.published` compares the estimate with published steps of other systems.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rstar_lab.hardware.profiles import Profile
from rstar_lab.rl.data.sources import is_problem_set
from rstar_lab.rl.preflight.context import Architecture, CheckContext, NotNeeded, Warn
from rstar_lab.rl.recipe import Problems, Recipe, RlSection
from rstar_lab.rl.recipe.sft import Lora
from rstar_lab.rl.resolved import read_problems
from rstar_lab.untrusted.parquet import read_footer
from rstar_lab.untrusted.text import counted

# Mean response over the limit: 2.5K of 8K, 5K of 12K and 7K of 12K in the stages of the rStar2-Agent report.
MEAN_RESPONSE_SHARE = 0.45
PROMPT_TOKENS = 500
SFT_TOKENS = 600  # mean tokens of a conversation; our assumption for short function calls and chats
SET_SIZES = {"aime24": 30, "aime25": 30, "hmmt25": 30, "math500": 500}  # problems, if the file is not on this machine
LONGEST_PROMPT_TOKENS = 2048
CALLS_PER_ROLLOUT = 2.75  # the rStar2-Agent report: 45K calls in a step of 16,384 rollouts
DISK_BYTES_PER_S = 2e9  # of a shared file system, for all ranks together
STATE_BYTES = 16  # bytes per parameter in training: fp32 weight 4, gradient 4, the two moments of AdamW 8
LORA_BASE_BYTES = 2  # bytes per frozen parameter: bf16
# Numbers; the local trainer computes logits in chunks of this size, and in smaller ones with a frozen head (training/log_probs.py).
LOCAL_LOGITS, LOCAL_FROZEN_LOGITS = 2**28, 2**26
VERL_CHUNKS = 16  # parts of the logits of which one has fp32 copies (verl/attention.py)
GB = 1e9
# Prompt of the paper's format with its tool schema, and mean length of a generated SFT conversation without its system prompt,
# which is computed once for several conversations.
CPU_PROMPT_TOKENS, CPU_CONVERSATION_TOKENS = 450, 240
# Share of the rate of a matrix product that a whole pass reaches. SFT of SmolLM2-135M takes 3 ms of
# CPU time per token in bf16 and 10 ms in float32; generation reads all weights for few tokens.
TRAINING_SHARE, GENERATION_SHARE = 0.5, 0.2
CPU_ACTIVATIONS = 2 * 2**30  # limit of a micro-batch of SFT


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU in GB.

    longest: tokens of the longest sequence in training. served: tokens of the longest sequence for which the engine is
    started, evaluations included; vLLM does not start if its KV cache holds less. together: training and engine hold their
    memory at the same time (local trainer). Otherwise the engine sleeps during the update, and only what is not offloaded
    coexists with it (verl).
    """

    weights: float
    training_state: float
    training_peak: float
    rollout_peak: float
    kv_tokens: int
    longest: int
    served: int
    hbm: float
    together: bool = False

    @property
    def peak(self) -> float:
        """The largest amount that is held at one time."""
        return self.training_peak + self.rollout_peak if self.together else max(self.training_peak, self.rollout_peak)

    @property
    def fits(self) -> bool:
        return self.peak <= self.hbm and self.kv_tokens >= self.served


def served_tokens(model: Architecture, recipe: Recipe, rl: RlSection, profile: Profile) -> int:
    """Return the longest sequence (prompt and response) that the engine is started for, as the trainers start it."""
    evaluated = recipe.evaluate.max_response_tokens
    if profile.trainer == "verl":
        return LONGEST_PROMPT_TOKENS + max(rl.limits.max_response_tokens, evaluated if recipe.evaluate.sets else 0)
    sections = [rl, *map(recipe.settings, recipe.stages)]
    longest = LONGEST_PROMPT_TOKENS + max(evaluated, *(keys.limits.max_response_tokens for keys in sections))
    return min(longest, model.positions or longest)


def memory(model: Architecture, recipe: Recipe, rl: RlSection, profile: Profile) -> Memory:
    """Estimate the memory of one GPU for a stage with the keys `rl`, with the trainer of the profile."""
    if profile.trainer == "local":
        return _local_memory(model, recipe, rl, profile)
    return _verl_memory(model, recipe, rl, profile)


def _local_memory(model: Architecture, recipe: Recipe, rl: RlSection, profile: Profile) -> Memory:
    """One GPU holds the training state, one micro-batch and the engine at the same time. Engine = recipe's
    engine.gpu_memory_utilization x HBM; micro-batch = rl.micro_batch_tokens, at least the longest sequence. The peak is at
    the LM head: state, bf16 copies of all weights, activations, and logits of one chunk in bf16 and fp32. Activations are
    hidden x layers numbers per token, without gradient checkpointing those of `layer_activations` x layers. A KL reference
    adds its weights. With rl.lora the base is held in bf16, and gradients and optimizer states exist for the adapters only.
    """
    hbm = profile.hardware.hbm_gb
    longest = LONGEST_PROMPT_TOKENS + rl.limits.max_response_tokens
    tokens = max(rl.micro_batch_tokens, longest)
    bf16 = rl.precision != "fp32"
    state = STATE_BYTES * model.parameters
    if rl.lora is not None:
        base = LORA_BASE_BYTES if bf16 else 4
        state = base * model.parameters + STATE_BYTES * lora_parameters(model, rl.lora)
    copies = 0 if rl.lora is not None or not bf16 else 2 * model.parameters
    of_layer = layer_activations(model, bf16, fused=True)
    if rl.gradient_checkpointing:
        of_layer = (2 if bf16 else 4) * model.hidden
    chunk = min(tokens * model.vocabulary, LOCAL_LOGITS if rl.lora is None else LOCAL_FROZEN_LOGITS)
    logits = chunk * (6 if bf16 else 4)
    reference = 4 * model.parameters if rl.method.kl_coefficient > 0 else 0
    weights = 2 * model.parameters
    engine = recipe.engine.gpu_memory_utilization * hbm * GB
    kv = (engine - weights - 2 * GB) / model.kv_bytes(profile.engine.kv_cache_dtype_bytes)
    training = state + copies + tokens * of_layer * model.layers + logits + reference
    served = served_tokens(model, recipe, rl, profile)
    return Memory(
        weights / GB, state / GB, training / GB, engine / GB, max(0, int(kv)), longest, served, hbm, together=True
    )  # fmt: skip


def layer_activations(model: Architecture, bf16: bool, *, fused: bool) -> int:
    """Return the bytes per token that a layer saves for its backward pass.

    These are numbers of the sizes hidden, heads x head dimension, kv heads x head dimension and feed-forward. RMSNorm saves fp32
    copies unless it is fused; fused SwiGLU saves one number less per feed-forward unit (`rl.models.gpu`). Norms of queries and
    keys save their inputs.
    """
    sizes = (model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim, model.feed_forward)
    norm = int(model.query_norm)
    each = (16, 6 + 6 * norm, 4 + 6 * norm, 8)  # bytes, of bf16
    if not bf16:
        each = (24, 12 + 8 * norm, 8 + 8 * norm, 16)
    elif fused:
        each = (8, 6 + 2 * norm, 4 + 2 * norm, 6)
    return sum(size * count for size, count in zip(sizes, each, strict=True))


def lora_parameters(model: Architecture, lora: Lora) -> int:
    """Return the parameters of the adapters: rank x (inputs + outputs) of every target layer."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    hidden, inner = model.hidden, model.feed_forward
    sizes = {
        "q_proj": hidden + query, "k_proj": hidden + key, "v_proj": hidden + key, "o_proj": query + hidden,
        "gate_proj": hidden + inner, "up_proj": hidden + inner, "down_proj": inner + hidden,
    }  # fmt: skip
    return lora.rank * model.layers * sum(sizes.get(target, 0) for target in lora.targets)


def _verl_memory(model: Architecture, recipe: Recipe, rl: RlSection, profile: Profile) -> Memory:
    """Training phase: state + checkpointed activations + the largest of logits, head and layer. Rollout phase: the engine +
    the training memory that is not offloaded.

    state = 16 bytes x parameters / shards, of frozen ones 4; activations = 2 bytes x hidden x layers per token; logits = micro-batch tokens
    x vocabulary x 4 bytes (bf16 and their gradient) and three fp32 copies of a sixteenth; head = vocabulary x hidden x
    12 bytes (weights and gradient in bf16, gradient in fp32 and packed for the reduction); layer = the backward pass of one
    layer: its activations, two gradients of the feed-forward size, and 14 bytes per parameter (weights of two layers in
    bf16, gradient in bf16, in fp32 and packed). Frozen parameters have no gradients, so head = 2 and layer = 4 bytes.
    KV tokens of a replica = (share x HBM x tensor parallel - weights) / KV bytes per token.
    """
    hardware, engine, parallel = profile.hardware, profile.engine, profile.parallelism
    longest = LONGEST_PROMPT_TOKENS + rl.limits.max_response_tokens
    weights = 2 * model.parameters / GB
    adapters = lora_parameters(model, rl.lora) if rl.lora else 0
    trained = adapters or model.parameters
    shards = shard_size(profile) * GB
    parameters, moments = 4 * (model.parameters + adapters) / shards, 8 * trained / shards
    state = parameters + 1.5 * moments  # gradients take half of the moments
    tokens = max(parallel.tokens_per_gpu, -(-longest // parallel.sequence_parallel))
    bf16 = rl.precision == "bf16" or (rl.precision == "auto" and engine.dtype != "float32")
    number = 2 if bf16 else 4
    logits = tokens * model.vocabulary * (2 * number + 12 / VERL_CHUNKS)
    head = model.vocabulary * model.hidden * (2 if adapters else 12)
    layer = tokens * (layer_activations(model, bf16, fused=False) + 2 * number * model.feed_forward)
    layer += (4 if adapters else 14) * model.layer_parameters
    activations = tokens * model.hidden * number * model.layers
    engine_gb = engine.memory_utilization * hardware.hbm_gb
    kept = (0 if parallel.offload_params else parameters) + (0 if parallel.offload_optimizer else moments)
    kv = (engine_gb * engine.tensor_parallel - weights - 4) * GB / model.kv_bytes(engine.kv_cache_dtype_bytes)
    training, served = state + (activations + max(logits, head, layer)) / GB, served_tokens(model, recipe, rl, profile)
    return Memory(weights, state, training, engine_gb + kept, max(0, int(kv)), longest, served, hardware.hbm_gb)


def shard_size(profile: Profile) -> int:
    """Return the number of GPUs over which the training state is sharded."""
    if profile.trainer == "local":
        return 1
    size = profile.parallelism.fsdp_size
    return size if 0 < size < profile.hardware.gpus else max(1, profile.hardware.gpus)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by phase. old_log_probs and update include `communication`, the exposed part of collectives."""

    generation: float
    tail: float
    old_log_probs: float
    update: float
    weights: float
    checkpoint: float
    communication: float = 0.0

    @property
    def total(self) -> float:
        return self.generation + self.tail + self.old_log_probs + self.update + self.weights + self.checkpoint


FORMULA = (
    "step = generation + tail + old log-probs + update + weights + checkpoint; "
    "generation = rollouts per replica x mean response x t(B) / B, t(B) = max((weights + B x mean context x KV bytes) / "
    "(bandwidth x share), 2 x active parameters x B / (flops x MFU)); tail = (limit - mean response) x t(4); "
    "old log-probs = one forward pass of the kept tokens, update = 4 of them (backward 2, recomputation 1) / (GPUs x flops x MFU), "
    "each plus the exposed communication: per micro-batch the bf16 weights are gathered once (forward) or twice (forward, "
    "backward) and fp32 gradients reduced, ring collectives over a shard group of fsdp_size GPUs; with HSDP gradients are also "
    "reduced between groups, in every micro-batch as verl does; a share `overlap` is hidden behind computation; "
    "weights = bf16 weights / weight_sync_gb_per_s; mean response = 45% of the limit"
)


def exposed_communication(
    model: Architecture, rl: RlSection, profile: Profile, compute: tuple[float, float]
) -> tuple[float, float]:
    """Return the seconds of collectives that computation does not hide, in the old log-probs and in the update.

    compute: seconds of computation of both. A ring all-gather or reduce-scatter of S bytes over n GPUs moves S x (n - 1) / n
    bytes through each GPU, an all-reduce twice as many. Inside a node the rate is link_gb_per_s, beyond it network_gb_per_s.
    """
    hardware, measured, shards = profile.hardware, profile.measured, shard_size(profile)
    if hardware.gpus <= 1 or profile.trainer == "local":
        return 0.0, 0.0
    inside = shards <= hardware.gpus_per_node
    rate = (measured.link_gb_per_s if inside else measured.network_gb_per_s) * GB
    network = (measured.network_gb_per_s if hardware.nodes > 1 else measured.link_gb_per_s) * GB
    gather = 2 * model.parameters * (shards - 1) / shards / rate
    reduce = 4 * model.parameters * (shards - 1) / shards / rate
    kept = rl.problems_per_step * rl.group_size
    tokens = kept * (PROMPT_TOKENS + MEAN_RESPONSE_SHARE * rl.limits.max_response_tokens)
    micro_batches = max(rl.mini_batches, -(-tokens // (hardware.gpus * profile.parallelism.tokens_per_gpu)))
    groups = hardware.gpus // shards
    between = 2 * (4 * model.parameters / shards) * (groups - 1) / groups / network
    totals = (micro_batches * gather, micro_batches * (2 * gather + reduce + between))
    old, update = (total - min(measured.overlap * total, work) for total, work in zip(totals, compute, strict=True))
    return old, update


def decode_seconds(model: Architecture, rl: RlSection, profile: Profile) -> Callable[[float], float]:
    """Return a function: sequences in the batch of a replica -> seconds for one more token of each (t(B) in FORMULA)."""
    hardware, engine, measured = profile.hardware, profile.engine, profile.measured
    context = PROMPT_TOKENS + MEAN_RESPONSE_SHARE * rl.limits.max_response_tokens / 2
    bandwidth = hardware.hbm_tb_per_s * 1e12 * engine.tensor_parallel * measured.decode_bandwidth_share
    flops = hardware.bf16_tflops * 1e12 * engine.tensor_parallel * measured.prefill_mfu

    def read_bytes(batch: float) -> float:
        """The weights that a batch touches: with few sequences not every expert is used."""
        share = 1.0
        if model.experts:
            share = 1 - (1 - model.active_experts / model.experts) ** batch
        experts = model.parameters - model.active_parameters
        weights = 2 * (model.active_parameters + share * experts)
        return weights + batch * context * model.kv_bytes(engine.kv_cache_dtype_bytes)

    @functools.cache  # the step simulator calls it at every event
    def seconds(batch: float) -> float:
        return max(read_bytes(batch) / bandwidth, model.forward_flops(batch, context) / flops)

    return seconds


def replica_batch(model: Architecture, recipe: Recipe | None, rl: RlSection, profile: Profile) -> float:
    """Return the sequences that a replica can run together: its limit, and the room in its KV cache."""
    response = MEAN_RESPONSE_SHARE * rl.limits.max_response_tokens
    room = memory(model, recipe or Recipe(model="-"), rl, profile).kv_tokens / (PROMPT_TOKENS + response)
    return max(1.0, min(profile.engine.max_sequences, room))


def step_time(model: Architecture, rl: RlSection, profile: Profile, recipe: Recipe | None = None) -> StepTime:
    """Estimate one step of a stage by FORMULA. recipe: read for the engine's memory, which limits its batch."""
    hardware, measured = profile.hardware, profile.measured
    kept = rl.problems_per_step * rl.group_size
    rollouts = kept * (1 if rl.method.roc.rule == "none" else rl.method.roc.oversample)
    generation, tail = rollout_seconds(model, rl, profile, recipe, rollouts)
    length = PROMPT_TOKENS + MEAN_RESPONSE_SHARE * rl.limits.max_response_tokens
    trained = model.forward_flops(kept * length, length)
    forward = trained / (max(1, hardware.gpus) * hardware.bf16_tflops * 1e12 * measured.training_mfu)
    # The local trainer takes them from the forward pass of its only mini-batch.
    is_free = rl.old_log_probs == "engine" or (profile.trainer == "local" and rl.mini_batches == 1)
    old = 0.0 if is_free else forward
    exposed_old, exposed_update = exposed_communication(model, rl, profile, (old, 4 * forward))
    exposed_old = exposed_old if old else 0.0
    return StepTime(
        generation=generation,
        tail=tail,
        old_log_probs=old + exposed_old,
        update=4 * forward + exposed_update,
        weights=2 * model.parameters / (measured.weight_sync_gb_per_s * GB),
        checkpoint=checkpoint_bytes(model, rl, profile.trainer) / DISK_BYTES_PER_S / rl.checkpoint_every,
        communication=exposed_old + exposed_update,
    )


def rollout_seconds(
    model: Architecture, rl: RlSection, profile: Profile, recipe: Recipe | None, rollouts: float
) -> tuple[float, float]:
    """Return the seconds of `generation` and `tail` (FORMULA) of rollouts with the limit of `rl`."""
    response = MEAN_RESPONSE_SHARE * rl.limits.max_response_tokens
    per_replica = rollouts / max(1, profile.hardware.gpus // profile.engine.tensor_parallel)
    decode_step = decode_seconds(model, rl, profile)
    batch = max(1.0, min(per_replica, replica_batch(model, recipe, rl, profile)))
    generation = per_replica * response * decode_step(batch) / batch
    return generation, (rl.limits.max_response_tokens - response) * decode_step(4)


@dataclass(frozen=True)
class Costs:
    """Estimated seconds on a machine: of a step with its parts as text, of SFT on conversations, and of (rollouts, limit of a
    response) outside of a step. note: how the rates are known."""

    step: Callable[[RlSection], tuple[float, str]]
    sft: Callable[[int], float]
    generate: Callable[[int, int], float]
    note: str = ""


def gpu_costs(model: Architecture, recipe: Recipe, profile: Profile) -> Costs:
    """Return costs by FORMULA. SFT: four forward passes of epochs * conversations * SFT_TOKENS tokens."""

    def step(rl: RlSection) -> tuple[float, str]:
        found = step_time(model, rl, profile, recipe)
        phases = {name: value for name, value in vars(found).items() if name != "communication"}
        parts = ", ".join(f"{name.replace('_', ' ')} {value:.0f}" for name, value in phases.items())
        return found.total, f"{parts}; {found.communication:.0f} of them communication"

    def sft(conversations: int) -> float:
        assert recipe.sft is not None
        tokens = recipe.sft.epochs * conversations * min(SFT_TOKENS, recipe.sft.max_tokens)
        rate = max(1, profile.hardware.gpus) * profile.hardware.bf16_tflops * 1e12 * profile.measured.training_mfu
        return 4 * model.forward_flops(tokens, SFT_TOKENS) / rate

    def generate(rollouts: int, limit: int) -> float:
        limits = recipe.rl.limits.model_copy(update={"max_response_tokens": limit})
        return sum(rollout_seconds(model, recipe.rl.model_copy(update={"limits": limits}), profile, recipe, rollouts))

    return Costs(step, sft, generate)


def cpu_memory(context: CheckContext) -> str:
    """Estimate the peak memory of SFT and RL. Raises Warn if it exceeds the memory of the profile."""
    recipe, model = context.recipe, _shape(context)
    engines = recipe.engine.count or min(4, context.profile.hardware.cpus_per_node)
    if recipe.engine.kind == "server":
        engines = 0
    elif recipe.engine.kind == "transformers":
        engines = 1
    weights = model.parameters * (4 if recipe.engine.dtype == "float32" else 2)
    rollouts = engines * (weights + (recipe.engine.kv_cache_gb or 1.0) * GB + 0.6 * GB)
    training = {"RL": _state(model, recipe.rl.lora) if recipe.stages else 0.0}
    if recipe.sft is not None:
        training["SFT"] = _state(model, recipe.sft.lora)
    name, state = max(training.items(), key=lambda item: item[1])
    peak = recipe.processes * (state + CPU_ACTIVATIONS) + rollouts
    available = context.profile.hardware.memory_gb_per_node
    message = (
        f"about {peak / GB:.1f} GB of {available:.0f} GB: {name} {recipe.processes * state / GB:.1f} GB, "
        f"micro-batch {recipe.processes * CPU_ACTIVATIONS / GB:.1f} GB, {counted(engines, 'engine')} {rollouts / GB:.1f} GB"
    )
    if peak > available * GB:
        raise Warn(
            f"{message}: does not fit; set engine.count=1, processes=1, rl.lora and sft.lora, or engine.kv_cache_gb"
        )
    return message


def cpu_costs(context: CheckContext) -> Costs:
    """Return costs from the speed of a matrix product on this machine."""
    recipe, parameters, rate = context.recipe, _shape(context).parameters, _matrix_rate()
    training, generation = rate * TRAINING_SHARE / 6, rate * GENERATION_SHARE / 2  # parameters x tokens per second

    def sft(conversations: int) -> float:
        assert recipe.sft is not None
        return recipe.sft.epochs * conversations * CPU_CONVERSATION_TOKENS * parameters / training

    def generate(rollouts: int, limit: int) -> float:
        return rollouts * MEAN_RESPONSE_SHARE * limit * parameters / generation

    def step(rl: RlSection) -> tuple[float, str]:
        kept, limit = rl.problems_per_step * rl.group_size, rl.limits.max_response_tokens
        sampled = generate(int(kept * rl.method.roc.oversample), limit)
        # The rows of a group hold its prompt about twice; most steps keep all rollouts.
        tokens = kept * MEAN_RESPONSE_SHARE * limit + 2 * rl.problems_per_step * CPU_PROMPT_TOKENS
        update = tokens * parameters / training
        return sampled + update, f"generate {sampled:.0f}, update {update:.0f}"

    return Costs(step, sft, generate, f" ({rate / 1e9:.0f} GFLOP/s measured now, on this machine)")


def _shape(context: CheckContext) -> Architecture:
    if context.recipe.model == "tiny":
        raise NotNeeded("the tiny model needs less than 8 GB and no GPU")
    return context.architecture


def _state(model: Architecture, lora: Lora | None) -> float:
    """Return the bytes of weights, gradients and moments in float32; with adapters only those of the adapters are trained."""
    if lora is None:
        return STATE_BYTES * model.parameters
    return 4 * model.parameters + STATE_BYTES * lora_parameters(model, lora)


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


def other_time(recipe: Recipe, costs: Costs) -> tuple[dict[str, float], list[str]]:
    """Return the seconds of the parts of a job beside the steps of RL, and the parts whose data files are missing.

    Filter: `samples` rollouts of each problem. Evaluation: `samples` rollouts of each problem of all sets, of the model before SFT,
    before RL and after each stage. `evaluate.during` is counted apart.
    """
    seconds: dict[str, float] = {}
    missing: list[str] = []

    def count(section: Problems, part: str, default: int = 0) -> int:
        if section.file is not None and not is_problem_set(section.file) and not default:
            missing.append(f"{part} ({section.file} is missing)")
        return problem_count(section) or default

    if (sft := recipe.sft) is not None:
        conversations = count(sft.problems, "SFT") if sft.problems else 0
        for entry in sft.conversations:
            if entry.count is None and not entry.file.is_file():
                missing.append(f"SFT ({entry.file} is missing)")
            rows = row_count(entry.file) if entry.file.is_file() else entry.count or 0
            conversations += min(rows, entry.count or rows)
        seconds["SFT"] = costs.sft(conversations)
    for stage in recipe.stages:
        if stage.filter:
            part, limit = f"filter of stage {stage.name}", recipe.settings(stage).limits.max_response_tokens
            problems = sum(count(section, part) for section in recipe.stage_problems(stage))
            if problems:
                seconds[part] = costs.generate(problems * stage.filter.samples, limit)
    steps, every = sum(stage.steps for stage in recipe.stages), recipe.evaluate.during.every
    models = 1 + len(recipe.stages) + (recipe.sft is not None)
    parts = [("evaluation", models, recipe.evaluate)]
    parts += [("evaluation during RL", steps // every, recipe.evaluate.in_training())] if every else []
    for part, times, evaluate in parts:
        sizes = [
            count(section, f"evaluation of {name}", SET_SIZES.get(name, 0)) for name, section in evaluate.sets.items()
        ]
        one = costs.generate(sum(sizes) * evaluate.samples, evaluate.max_response_tokens) if sum(sizes) else 0.0
        seconds[f"{part} ({times} times)"] = times * one
    return {part: value for part, value in seconds.items() if value}, list(dict.fromkeys(missing))


def row_count(file: Path) -> int:
    """Return the number of rows of a file of conversations."""
    if file.suffix == ".parquet":
        return read_footer(file).num_rows
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def checkpoint_bytes(model: Architecture, rl: RlSection, trainer: str) -> float:
    """Return the bytes of one checkpoint: the fp32 model 4 bytes per parameter, the moments of AdamW 8; under verl also the
    exported fp32 model, 4. With rl.lora the moments are those of the adapters, and the merged model is stored too.
    """
    verl = trainer == "verl"
    if rl.lora is None:
        return (16 if verl else 12) * model.parameters
    merged = 12 if verl else LORA_BASE_BYTES  # verl: shards of the base, export and merged model, all in fp32
    return merged * model.parameters + 12 * lora_parameters(model, rl.lora)


def disk_bytes(model: Architecture, recipe: Recipe, trainer: str = "verl") -> tuple[float, float]:
    """Return (checkpoints, run store): kept checkpoints and the one being written; rollouts of all steps and filters.

    A token takes 10 bytes (id 4, mask 1/8, three float16), about half after compression; messages take 1.5 bytes per token.
    """
    store = 0.0
    checkpoints = 0.0
    for stage in recipe.stages:
        rl = recipe.settings(stage)
        checkpoints = max(checkpoints, (rl.keep_checkpoints + 1) * checkpoint_bytes(model, rl, trainer))
        oversample, response = rl.method.roc.oversample, MEAN_RESPONSE_SHARE * rl.limits.max_response_tokens
        rollouts = rl.problems_per_step * rl.group_size * oversample
        share = {"all": 1.0, "kept": 1 / oversample, "sampled": 1 / (rl.group_size * oversample)}[rl.token_arrays]
        store += stage.steps * rollouts * response * (10 * share * 0.5 + 1.5)
        if stage.filter:  # it stores all token arrays
            problems = sum(map(problem_count, recipe.stage_problems(stage)))
            store += problems * stage.filter.samples * response * (10 * 0.5 + 1.5)
    return checkpoints, store


def problem_count(section: Problems) -> int:
    """Return the number of problems of a section; 0 if its file is missing, which the check `data` reports."""
    if section.synthetic is not None:
        count = section.synthetic.count
    elif section.file is None or not is_problem_set(section.file):
        return 0
    elif section.file.suffix == ".parquet":
        count = read_footer(section.file).num_rows
    else:
        count = len(read_problems(section))
    return min(count, section.limit or count)
