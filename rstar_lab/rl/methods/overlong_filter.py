"""Overlong filtering (DAPO, arXiv 2503.14476, section 3.4): truncated rollouts are left out of the loss.

rStar2-Agent tried it and found that more responses were truncated ("unsuccessful attempts").
"""

from typing import ClassVar, Literal

from rstar_lab.rl.algorithm.hooks import Exclusion
from rstar_lab.rl.algorithm.streams import Streams
from rstar_lab.rl.methods.base import MethodSection
from rstar_lab.rl.trajectory import Trajectory


class OverlongFilter(MethodSection):
    """Leaves truncated rollouts out of the loss (overlong filtering of DAPO, arXiv 2503.14476). Advantages are computed with them.
    The paper tried it without success."""

    type: Literal["overlong_filter"] = "overlong_filter"
    """Name of the method."""

    excluded: ClassVar[Exclusion] = Exclusion("overlong")

    def score_rollout(self, rollout: Trajectory, streams: Streams) -> Streams | None:
        return None if rollout.truncated else streams
