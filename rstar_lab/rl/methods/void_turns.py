"""Filter of void turns (SimpleTIR, arXiv 2509.02479): a turn is void if it has neither a tool call nor an answer."""

from typing import ClassVar, Literal

from rstar_lab.rl.algorithm.hooks import Exclusion
from rstar_lab.rl.algorithm.streams import Streams
from rstar_lab.rl.methods.base import MethodSection
from rstar_lab.rl.trajectory import Trajectory


class VoidTurns(MethodSection):
    """Excludes rollouts with a turn that has neither a tool call nor an answer from the loss (SimpleTIR, arXiv 2509.02479)."""

    type: Literal["void_turns"] = "void_turns"
    """Name of the method."""

    excluded: ClassVar[Exclusion] = Exclusion("void", "void")

    def score_rollout(self, rollout: Trajectory, streams: Streams) -> Streams | None:
        return None if any(turn.void for turn in rollout.turns) else streams
