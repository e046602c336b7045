"""The sections `rl.lora` and `sft.lora` of a recipe."""

from rstar_lab.rl.section import Positive, Section


class Lora(Section):
    """Train low-rank adapters instead of all weights (LoRA, arXiv 2106.09685). The base weights are frozen."""

    rank: Positive = 32
    """Rank of the adapters. Default: our choice."""
    alpha: Positive | None = None
    """The adapters are scaled by alpha / rank. Default: 2 * rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get adapters. Default: all linear layers of a Llama or Qwen block."""

    @property
    def resolved_alpha(self) -> int:
        return self.alpha or 2 * self.rank
