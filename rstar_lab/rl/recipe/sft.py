"""The `sft` section of a recipe, and the sections `sft.lora` and `rl.lora`."""

from typing import Literal

from pydantic import Field, model_validator

from rstar_lab.rl.recipe.data import MixEntry, Problems
from rstar_lab.rl.section import Positive, Section


class Lora(Section):
    """Train low-rank adapters instead of all weights (LoRA, arXiv 2106.09685)."""

    rank: Positive = 32
    """Rank of the adapters."""
    alpha: Positive | None = None
    """Adapters are scaled by alpha / rank. Default: 2 * rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get adapters. Default: all linear layers of a Llama or Qwen block."""

    @property
    def resolved_alpha(self) -> int:
        return self.alpha or 2 * self.rank


class SftConfig(Section):
    """Hyperparameters of SFT."""

    epochs: float = Field(3, gt=0)
    """Passes over the data. Default: paper, section 5.1."""
    batch_size: int = Field(128, ge=1)
    """Conversations per optimizer step. Default: paper, section 5.1."""
    lr: float = Field(5e-6, gt=0)
    """Peak learning rate of AdamW. Default: paper, section 5.1."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`adamw`, or `muon`: Muon for weight matrices and AdamW for all other parameters."""
    muon_lr: float = Field(1e-2, gt=0)
    """Peak learning rate of Muon. Used only with `optimizer: muon`."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    warmup: float = Field(0.04, ge=0, lt=1)
    """Share of the steps during which the learning rate rises linearly. Default: paper, section 5.1."""
    schedule: Literal["cosine", "linear_tail"] = "cosine"
    """Learning-rate schedule after warm-up. `cosine`: cosine decay to 0 (paper, section 5.1). `linear_tail`: constant,
    then linear decay to 0 over the second half of the steps."""
    grad_clip: float = Field(1.0, gt=0)
    """Maximum norm of the gradient."""
    max_tokens: int = Field(8192, ge=2)
    """Maximum tokens of a conversation. Longer ones are left out and counted."""
    packing: bool = True
    """Put several conversations into one sequence, without attention between them."""
    micro_batch_tokens: int = Field(8192, ge=2)
    """Maximum tokens in one forward pass; on a CPU at most 2,048, and fewer for a large model. Changes memory and speed, not the
    result."""
    lora: Lora | None = None
    """Train adapters only. RL then starts from the merged model."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of matrix products; weights stay fp32. `auto`: bf16 if the hardware supports it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more computation."""
    checkpoint_every: int = Field(200, ge=1)
    """Steps between checkpoints."""
    seed: int = 0
    """Seed of the order of conversations."""


class SftSection(SftConfig):
    """SFT without reasoning: instruction following, JSON tool calls and the answer format (paper, section 4.1)."""

    problems: Problems | None = None
    """Synthetic problems. Their solution traces are generated and executed in the sandbox."""
    mix: dict[str, float] = Field({})
    """Relative frequency of each kind of synthetic trace, such as `clean: 0.8`; all fields: `TraceMix` in rl/synthetic/traces.py."""
    conversations: tuple[MixEntry, ...] = ()
    """Files of conversations, and how many conversations to use of each."""

    @model_validator(mode="after")
    def _check_data(self) -> "SftSection":
        if self.problems is None and not self.conversations:
            raise ValueError("give problems, conversations or both")
        return self
