"""Filter of misplaced control tokens (after arXiv 2606.26027, which finds that they become frequent before training collapses).

The paper adds SFT steps; here the rollouts are left out of the loss.
"""

from typing import Literal

from rstar_lab.rl.section import Section


class ControlTokens(Section):
    """Excludes rollouts from the loss in which the model writes a control token that does not belong there: a role marker, a tag
    of tool responses, or a `<tool_call>` tag without its counterpart. Such tokens precede collapse (arXiv 2606.26027)."""

    type: Literal["control_tokens"] = "control_tokens"
    """Name of the method."""
