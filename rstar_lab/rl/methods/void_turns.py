"""Filter of void turns (SimpleTIR, arXiv 2509.02479): a turn is void if it has neither a tool call nor an answer."""

from typing import Literal

from rstar_lab.rl.section import Section


class VoidTurns(Section):
    """Excludes rollouts with a turn that has neither a tool call nor an answer from the loss (SimpleTIR, arXiv 2509.02479)."""

    type: Literal["void_turns"] = "void_turns"
    """Name of the method."""
