"""Branching rollouts (after ARPO, arXiv 2507.19849): a rollout is branched after a tool response that makes the model uncertain.

See `rollout.branching` for the rule and docs/algorithm.md for the differences from the paper.
"""

from typing import Literal

from rstar_lab.rl.section import Section


class Branching(Section):
    """Branching (after ARPO, arXiv 2507.19849): branches a rollout after a tool response if the entropy at the start of the next
    turn exceeds that of its first turn by more than `entropy`. Branches replace up to half of the rollouts of a group. Not with
    `schedule.lockstep`. Local trainer only."""

    type: Literal["branching"] = "branching"
    """Name of the method."""
    entropy: float
    """Difference of the entropies in nats per token."""
