"""ECHO (arXiv 2605.24517): the model also learns to predict what its tools return.

The loss gets weight * mean of -log p over the response tokens that the model did not generate, where the mean is taken
over the tokens of the mini-batch.
"""

from typing import Literal

from pydantic import Field

from rstar_lab.rl.section import Section


class Echo(Section):
    """ECHO (arXiv 2605.24517): adds the cross-entropy of the tokens of tool responses to the loss, so that the model learns to
    predict what its code prints. Local trainer only."""

    type: Literal["echo"] = "echo"
    """Name of the method."""
    weight: float = Field(gt=0)
    """Weight of the mean cross-entropy."""
