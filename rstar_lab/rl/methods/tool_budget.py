"""Penalty on the tool calls of successful rollouts of easy problems (after AdaTIR, arXiv 2601.14696).

weight * sin(pi/2 * calls / max_turns) is subtracted from the reward. The change of an advantage is clipped to half of its
size, so that it never changes the sign; the bound is ours.
"""

from typing import Literal

from pydantic import Field

from rstar_lab.rl.section import Section


class ToolBudget(Section):
    """Penalty on the tool calls of successful rollouts of easy problems, weight * sin(pi/2 * calls / max_turns) (after AdaTIR,
    arXiv 2601.14696). It changes an advantage by at most half of its size, so it never changes the sign; the bound is ours.
    Requires the method `grpo`."""

    type: Literal["tool_budget"] = "tool_budget"
    """Name of the method."""
    weight: float = Field(gt=0)
    """Weight of the penalty."""
    easy_from: float = Field(0.5, gt=0, le=1)
    """A problem is easy if the pass rate of its group is at least this value. Default: our choice."""
