"""On-policy distillation from a teacher (arXiv 2306.13649).

The advantage of each token gets weight * (log p_teacher - log p_student), whose policy gradient is that of the reverse KL
divergence to the teacher. Groups with equal rewards are kept, because the teacher distinguishes their rollouts.
"""

from typing import Literal

from pydantic import Field

from rstar_lab.rl.section import Section


class Opd(Section):
    """On-policy distillation (arXiv 2306.13649): adds weight * (log p_teacher - log p_student) to the advantage of each token.
    Groups with equal rewards are kept. Requires `engine.teacher_url`. Local trainer only."""

    type: Literal["opd"] = "opd"
    """Name of the method."""
    weight: float = Field(gt=0)
    """Weight of the difference of log-probs."""
