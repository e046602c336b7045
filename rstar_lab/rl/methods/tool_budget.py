"""Penalty on the tool calls of successful rollouts of easy problems (after AdaTIR, arXiv 2601.14696).

weight * sin(pi/2 * calls / max_turns) is subtracted from the reward. The change of an advantage is clipped to half of its
size, so that it never changes the sign; the bound is ours.
"""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from rstar_lab.rl.algorithm.advantages import group_advantages
from rstar_lab.rl.algorithm.hooks import Group
from rstar_lab.rl.algorithm.streams import Streams, rollout_streams
from rstar_lab.rl.methods.base import MethodSection

CLIP = 0.5  # largest relative change of an advantage; not from the paper


class ToolBudget(MethodSection):
    """Penalty on the tool calls of successful rollouts of easy problems, weight * sin(pi/2 * calls / max_turns) (after AdaTIR,
    arXiv 2601.14696). It changes an advantage by at most half of its size; the bound is ours. Requires the method `grpo`."""

    type: Literal["tool_budget"] = "tool_budget"
    """Name of the method."""
    weight: float = Field(gt=0)
    """Weight of the penalty."""
    easy_from: float = Field(0.5, gt=0, le=1)
    """Lowest pass rate of a group of an easy problem."""

    def check(self, rl: Any) -> None:
        if rl.method.type != "grpo":
            raise ValueError("method.add: tool_budget requires method: {type: grpo}")

    def score_group(self, group: Group, streams: list[Streams]) -> list[Streams]:
        plain = self._advantages(group.rewards)
        if np.mean([t.reward > 0 for t in group.generated]) < self.easy_from:
            return rollout_streams(plain)
        share = np.minimum([len(t.calls) / self._rl.limits.max_turns for t in group.rollouts], 1.0)
        successful = np.array([t.reward > 0 for t in group.rollouts])
        penalty = np.where(successful, self.weight * np.sin(np.pi / 2 * share), 0.0)
        bound = CLIP * np.abs(plain)
        return rollout_streams(plain + np.clip(self._advantages(group.rewards - penalty) - plain, -bound, bound))

    def _advantages(self, rewards: np.ndarray) -> np.ndarray:
        return group_advantages(rewards, [0] * len(rewards), normalise_std=self._rl.method.normalise_std)
