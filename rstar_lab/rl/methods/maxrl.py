"""MaxRL (arXiv 2602.02710): the advantage of a rollout is (r - mean) / mean over its group; 0 where the mean is 0.

With rewards of 0 and 1 the gradient is that of the log of the pass rate, which weights hard problems more.
"""

from typing import Literal

import numpy as np

from rstar_lab.common.errors import UserError
from rstar_lab.rl.algorithm.hooks import Group
from rstar_lab.rl.algorithm.streams import Streams, rollout_streams
from rstar_lab.rl.methods.method import Method


class Maxrl(Method):
    """MaxRL (arXiv 2602.02710): the reward minus the mean of its group, divided by the mean, which weights hard problems more.
    Refuses negative rewards."""

    type: Literal["maxrl"] = "maxrl"
    """Name of the method."""

    def score_group(self, group: Group, streams: list[Streams]) -> list[Streams]:
        if wrong := next((t for t in group.rollouts if t.reward < 0), None):
            raise UserError(
                f"rl.method.type: maxrl requires rewards of at least 0; rollout {wrong.traj_id} has {wrong.reward:g}: use a reward "
                "between 0 and 1, or grpo"
            )
        # The mean of shaped rewards can be close to 0, and the quotient is then unbounded: the divisor is unshaped.
        mean = np.mean([t.reward for t in group.rollouts])
        centred = group.rewards - group.rewards.mean()
        return rollout_streams(centred / mean if mean > 0 else np.zeros_like(centred))
