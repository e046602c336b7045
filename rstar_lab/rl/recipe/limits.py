"""The section `rl.limits`: limits of a rollout."""

from pydantic import Field

from rstar_lab.rl.renderers.base import TruncateSide
from rstar_lab.rl.section import Positive, Section


class LimitsSection(Section):
    """Limits of a rollout."""

    max_response_tokens: Positive = 8192
    """Maximum tokens of a response: all turns and tool responses together. Default: paper, stage 1."""
    max_turns: Positive = 10
    """Maximum model turns of a rollout. Default: paper, stages 1 and 2."""
    max_calls_per_turn: Positive = 8
    """Tool calls of one turn that are executed; each further call gets an error as its response. Default: our choice."""
    max_tool_chars: Positive = 4096
    """Maximum characters of a tool response; the middle of longer responses is removed. Default: our choice; the release uses
    256."""
    tool_truncate_side: TruncateSide = "middle"
    """How a long tool response is truncated; only with `prompt: {format: released}`. As in the release, `left` keeps the start
    and `right` keeps the end. Default: as the release."""
    time_limit_s: float | None = Field(None, gt=0)
    """Wall-clock limit of one rollout in seconds; it also interrupts a turn. Default: none."""
    tool_timeout_s: float = Field(30.0, gt=0)
    """Time limit of one call of your own tool in seconds. Code tools use `sandbox.timeout_s`. Default: our choice."""
