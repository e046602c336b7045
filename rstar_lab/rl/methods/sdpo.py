"""Self-distillation from a clean rollout of the group (after SDPO, arXiv 2601.20802).

A failed rollout is scored again with the text of a successful one of its group in the prompt. The advantage of each token
gets weight * (log p with it - log p without it). The paper's teacher is a moving average of the policy; here it is the
policy before the update.
"""

from typing import Literal

from pydantic import Field

from rstar_lab.rl.section import Section


class Sdpo(Section):
    """Self-distillation (after SDPO, arXiv 2601.20802): a failed rollout is scored again with a successful rollout of its group
    in the prompt, the one with the lowest RoC penalty and without tool errors; weight * (log p with it - log p) is added to
    the advantage of each token. One more forward pass. Local trainer only."""

    type: Literal["sdpo"] = "sdpo"
    """Name of the method."""
    weight: float = Field(gt=0)
    """Weight of the difference of log-probs."""
