"""REINFORCE++ (arXiv 2501.03262): advantages are normalised over all tokens of the step instead of each group.

With the baseline, its variant for groups, the mean reward of the group is subtracted first.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from rstar_lab.rl.algorithm.hooks import Group
from rstar_lab.rl.algorithm.streams import Streams, rollout_streams
from rstar_lab.rl.methods.method import Method
from rstar_lab.rl.methods.task_normalisation import normalise_tokens


class ReinforcePP(Method):
    """REINFORCE++ (arXiv 2501.03262): the reward minus the mean of its group, normalised to mean 0 and standard deviation 1 over
    the tokens of the step. Groups with equal rewards are kept."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    """Name of the method."""
    baseline: bool = True
    """Subtract the mean reward of the group. Default: the paper's variant for groups of rollouts."""

    equal_groups: ClassVar[Literal["drop", "cross_entropy", "train"]] = "train"

    def score(self, groups: Sequence[Group], streams: list[list[Streams]]) -> list[list[Streams]]:
        centred = [group.rewards - (group.rewards.mean() if self.baseline else 0.0) for group in groups]
        return normalise_tokens(groups, [rollout_streams(rewards) for rewards in centred], lambda rollout: "step")
