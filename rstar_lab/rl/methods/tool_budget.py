"""Penalty on the tool calls of successful rollouts of easy problems (after AdaTIR, arXiv 2601.14696).

weight * sin(pi/2 * calls / max_turns) is subtracted from the reward. The change of an advantage is clipped to half of its
size, so that it never changes the sign; the bound is ours.
"""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from rstar_lab.rl.algorithm.advantages import tool_budget_advantages
from rstar_lab.rl.algorithm.hooks import Group
from rstar_lab.rl.algorithm.streams import Streams, rollout_streams
from rstar_lab.rl.methods.base import MethodSection


class ToolBudget(MethodSection):
    """Penalty on the tool calls of successful rollouts of easy problems, weight * sin(pi/2 * calls / max_turns) (after AdaTIR,
    arXiv 2601.14696). It changes an advantage by at most half of its size, so it never changes the sign; the bound is ours.
    Requires the method `grpo`."""

    type: Literal["tool_budget"] = "tool_budget"
    """Name of the method."""
    weight: float = Field(gt=0)
    """Weight of the penalty."""
    easy_from: float = Field(0.5, gt=0, le=1)
    """A problem is easy if the pass rate of its group is at least this value. Default: our choice."""

    def check(self, rl: Any) -> None:
        if rl.method.type != "grpo":
            raise ValueError("method.add: tool_budget requires method: {type: grpo}")

    def score_group(self, group: Group, streams: list[Streams]) -> list[Streams]:
        rate, rollouts = float(np.mean([t.reward > 0 for t in group.generated])), len(group.rollouts)
        return rollout_streams(
            tool_budget_advantages(
                group.rewards,
                [0] * rollouts,
                [len(t.calls) for t in group.rollouts],
                [rate >= self.easy_from] * rollouts,
                weight=self.weight,
                max_calls=self._rl.limits.max_turns,
                normalise_std=self._rl.method.normalise_std,
                unshaped=[t.reward for t in group.rollouts],
            )
        )
