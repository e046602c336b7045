"""Filter of misplaced control tokens (after arXiv 2606.26027, which finds that they become frequent before training collapses).

The paper adds SFT steps; here the rollouts are left out of the loss.
"""

from typing import ClassVar, Literal

from rstar_lab.rl.algorithm.hooks import Exclusion
from rstar_lab.rl.algorithm.streams import Streams
from rstar_lab.rl.methods.base import MethodSection
from rstar_lab.rl.trajectory import Trajectory


class ControlTokens(MethodSection):
    """Excludes rollouts in which the model writes a misplaced control token from the loss: a role marker, a tag of tool
    responses, or a `<tool_call>` tag without its counterpart (arXiv 2606.26027)."""

    type: Literal["control_tokens"] = "control_tokens"
    """Name of the method."""

    excluded: ClassVar[Exclusion] = Exclusion("control_tokens", "control_tokens_dropped")

    def score_rollout(self, rollout: Trajectory, streams: Streams) -> Streams | None:
        return None if any(turn.control_token for turn in rollout.turns) else streams
