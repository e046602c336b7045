"""What a recipe needs of a machine, before a GPU is touched: memory, disk, time. Formulas, not measurements.

Units: bytes, seconds, tokens. Rates and efficiencies come from the hardware profile; every formula is in a docstring.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from rstar_lab.profiles import Profile
from rstar_lab.rl.recipe import Recipe, RlSection

# Of rStar2-Agent's table: mean response 2.5K of 8K, 5K of 12K, 7K of 12K over the stages.
MEAN_RESPONSE_SHARE = 0.45
PROMPT_TOKENS = 500
CALLS_PER_ROLLOUT = 2.75  # 45K calls a step of 16,384 rollouts
SYNC_BYTES_PER_S = 40e9  # weights from the trainer's shards to the engines, a GPU
DISK_BYTES_PER_S = 2e9  # a shared file system, all ranks together
STATE_BYTES = 16  # a parameter in training: fp32 weight 4, gradient 4, AdamW's two moments 8
GB = 1e9


@dataclass(frozen=True)
class Architecture:
    """A dense decoder, as its config.json says."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden + 2 * self.head_dim
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    def kv_bytes(self, bytes_each: int = 2) -> int:
        """KV cache of one token: 2 (key, value) x layers x kv heads x head dimension x bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_each

    def forward_flops(self, tokens: float, context: float) -> float:
        """2 x parameters a token, and attention: 4 x layers x heads x head dimension x half the context."""
        return tokens * (2 * self.parameters + 2 * self.layers * self.heads * self.head_dim * context)


# For recipes whose model is not on this machine.
KNOWN = {
    "Qwen3-14B": Architecture(40, 5120, 40, 8, 128, 17408, 151_936, False),
    "Qwen3-8B": Architecture(36, 4096, 32, 8, 128, 12288, 151_936, False),
    "Qwen3-4B": Architecture(36, 2560, 32, 8, 128, 9728, 151_936, True),
    "Qwen3-1.7B": Architecture(28, 2048, 16, 8, 128, 6144, 151_936, True),
    "tiny": Architecture(4, 192, 6, 2, 32, 512, 1024, False),
}


def architecture_of(model: str) -> Architecture | None:
    """From the folder's config.json, or by name; None where neither is known."""
    path = Path(model) / "config.json"
    if path.is_file():
        found = json.loads(path.read_text())
        head_dim = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
        return Architecture(
            found["num_hidden_layers"], found["hidden_size"], found["num_attention_heads"],
            found.get("num_key_value_heads", found["num_attention_heads"]), head_dim, found["intermediate_size"],
            found["vocab_size"], found.get("tie_word_embeddings", False),
        )  # fmt: skip
    name = Path(model).name.removesuffix("-Base")
    return KNOWN.get(name)


@dataclass(frozen=True)
class Memory:
    """Of one GPU, in GB. fits: both phases stay under the HBM."""

    weights: float
    training_state: float
    training_peak: float
    rollout_peak: float
    kv_tokens: int
    longest: int
    hbm: float

    @property
    def fits(self) -> bool:
        return max(self.training_peak, self.rollout_peak) <= self.hbm and self.kv_tokens >= self.longest


def memory(model: Architecture, rl: RlSection, profile: Profile, prompt_tokens: int = 2048) -> Memory:
    """Training phase: state + working set + activations + logits. Rollout phase: the engine's share + what training keeps.

    state = 16 bytes x parameters / GPUs (0 while offloaded); working set = two unsharded layers in bf16;
    activations = micro-batch tokens x (2 bytes x hidden x layers, checkpointed, + 34 bytes x hidden, one layer anew);
    logits = micro-batch tokens x vocabulary x 10 bytes (bf16 out, float32 log-softmax and its gradient).
    KV tokens of a replica = (share x HBM x tensor parallel - weights) / KV bytes a token.
    """
    hardware, engine, parallel = profile.hardware, profile.engine, profile.parallelism
    gpus = parallel.fsdp_size if parallel.fsdp_size > 0 else hardware.gpus
    longest = prompt_tokens + rl.max_response_tokens
    weights = 2 * model.parameters / GB
    state = STATE_BYTES * model.parameters / gpus / GB
    layer = 2 * (model.parameters / model.layers) * 2 / GB
    tokens = max(parallel.tokens_per_gpu, -(-longest // parallel.sequence_parallel))
    activations = tokens * model.hidden * (2 * model.layers + 34) / GB
    logits = tokens * model.vocabulary * 10 / GB
    engine_gb = engine.memory_utilization * hardware.hbm_gb
    kept = (0 if parallel.offload_params else state / 4) + (0 if parallel.offload_optimizer else state / 2)
    kv = (engine_gb * engine.tensor_parallel - weights - 4) * GB / model.kv_bytes(engine.kv_cache_dtype_bytes)
    return Memory(
        weights,
        state,
        state + layer + activations + logits,
        engine_gb + kept,
        max(0, int(kv)),
        longest,
        hardware.hbm_gb,
    )


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by what they are spent on."""

    generation: float
    tail: float
    old_log_probs: float
    update: float
    weights: float
    checkpoint: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


FORMULA = (
    "step = generation + tail + old log-probs + update + weights + checkpoint; "
    "generation = rollouts a replica x mean response x t(B) / B, t(B) = max((weights + B x mean context x KV bytes) / "
    "(bandwidth x share), 2 x parameters x B / (flops x MFU)); tail = (limit - mean response) x t(4); "
    "old log-probs = forward of the kept tokens, update = 4 forwards of them (backward 2, recomputation 1) / "
    "(GPUs x flops x MFU); mean response = 45% of the limit"
)


def step_time(model: Architecture, rl: RlSection, profile: Profile) -> StepTime:
    """The estimate of FORMULA for one step of a stage."""
    hardware, engine, measured = profile.hardware, profile.engine, profile.measured
    kept = rl.problems_per_step * rl.group_size
    rollouts = kept * (1 if rl.roc == "none" else rl.oversample)
    response = MEAN_RESPONSE_SHARE * rl.max_response_tokens
    context = PROMPT_TOKENS + response / 2
    tensor = engine.tensor_parallel
    replicas = hardware.gpus // tensor
    bandwidth = hardware.hbm_tb_per_s * 1e12 * tensor * measured.decode_bandwidth_share
    flops = hardware.bf16_tflops * 1e12

    def decode_step(batch: float) -> float:
        reading = (2 * model.parameters + batch * context * model.kv_bytes(engine.kv_cache_dtype_bytes)) / bandwidth
        return max(reading, model.forward_flops(batch, context) / (flops * tensor * measured.prefill_mfu))

    per_replica = rollouts / replicas
    room = memory(model, rl, profile).kv_tokens / (PROMPT_TOKENS + response)
    batch = max(1.0, min(per_replica, engine.max_sequences, room))
    trained = model.forward_flops(kept * (PROMPT_TOKENS + response), PROMPT_TOKENS + response)
    forward = trained / (hardware.gpus * flops * measured.training_mfu)
    return StepTime(
        generation=per_replica * response * decode_step(batch) / batch,
        tail=(rl.max_response_tokens - response) * decode_step(4),
        old_log_probs=0.0 if rl.old_log_probs == "engine" else forward,
        update=4 * forward,
        weights=2 * model.parameters / SYNC_BYTES_PER_S,
        checkpoint=STATE_BYTES * model.parameters / DISK_BYTES_PER_S / rl.checkpoint_every,
    )


def disk_bytes(model: Architecture, recipe: Recipe) -> tuple[float, float]:
    """(checkpoints, run store): kept checkpoints with optimizer and an exported model; token arrays of all steps.

    A token is id 4 + mask 1/8 + three float16, of which about half stay after compression; messages about 4 bytes a token.
    """
    store = 0.0
    kept = 0
    for stage in recipe.stages:
        rl = recipe.settings(stage)
        kept = max(kept, rl.keep_checkpoints)
        rollouts = rl.problems_per_step * rl.group_size * rl.oversample
        share = {"all": 1.0, "kept": 1 / rl.oversample, "sampled": 1 / (rl.group_size * rl.oversample)}[rl.token_arrays]
        tokens = rollouts * MEAN_RESPONSE_SHARE * rl.max_response_tokens
        store += stage.steps * tokens * (10 * share * 0.5 + 1.5)
    return (kept + 1) * 14 * model.parameters, store
