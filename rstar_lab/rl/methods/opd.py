"""On-policy distillation from a teacher (arXiv 2306.13649).

The advantage of each token gets weight * (log p_teacher - log p_student), whose policy gradient is that of the reverse KL
divergence to the teacher. Groups with equal rewards are kept, because the teacher distinguishes their rollouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from rstar_lab.rl.algorithm.config import LossConfig
from rstar_lab.rl.algorithm.hooks import ForwardPasses, MethodHooks
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.algorithm.streams import Streams
from rstar_lab.rl.section import Section
from rstar_lab.rl.trajectory import Trajectory


class Opd(Section):
    """On-policy distillation (arXiv 2306.13649): adds weight * (log p_teacher - log p_student) to the advantage of each token.
    Groups with equal rewards are kept. Requires `engine.teacher_url`."""

    type: Literal["opd"] = "opd"
    """Name of the method."""
    weight: float = Field(gt=0)
    """Weight of the difference of log-probs."""


@dataclass(frozen=True)
class OpdHooks(MethodHooks):
    """Adds the log-probs of the teacher."""

    weight: float
    equal_groups = "train"
    forward_phase = "teacher_s"
    reads_texts = True

    async def forward(self, selection: Selection, rollouts: Sequence[Trajectory], passes: ForwardPasses) -> Selection:
        teacher = await passes.teacher_log_probs(selection.trajectories)
        return selection.add([Streams(reference_log_prob_T=row) for row in teacher])

    def loss(self, config: LossConfig) -> LossConfig:
        return policy_gradient_kl(config, self.weight)


def policy_gradient_kl(config: LossConfig, weight: float) -> LossConfig:
    """Return the options of the loss with a reverse KL to a teacher, by its policy gradient."""
    return replace(config, kl_coefficient=weight, kl_estimator="policy_gradient", kl_metric="teacher_kl")
