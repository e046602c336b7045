"""GRPO (arXiv 2402.03300), the method of rStar2-Agent (arXiv 2508.20722, section 2.2.1).

The advantage of a rollout is (r - mean) / (std + 1e-6) over its group; std is that of the sample (n - 1).
"""

from typing import Literal

from rstar_lab.rl.algorithm.advantages import group_advantages
from rstar_lab.rl.algorithm.hooks import Group
from rstar_lab.rl.algorithm.streams import Streams, rollout_streams
from rstar_lab.rl.methods.method import Method


class Grpo(Method):
    """GRPO (arXiv 2402.03300): the advantage is the reward minus the mean of its group, divided by the standard deviation."""

    type: Literal["grpo"] = "grpo"
    """Name of the method."""
    normalise_std: bool = True
    """Divide by the standard deviation. Default: paper. `false`: Dr.GRPO (arXiv 2503.20783), with `aggregation:
    seq-mean-token-sum-norm`."""

    def score_group(self, group: Group, streams: list[Streams]) -> list[Streams]:
        return rollout_streams(
            group_advantages(group.rewards, [0] * len(group.rewards), normalise_std=self.normalise_std)
        )
