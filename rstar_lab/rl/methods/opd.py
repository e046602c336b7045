"""On-policy distillation from a teacher (arXiv 2306.13649).

The advantage of each token gets weight * (log p_teacher - log p_student), whose policy gradient is that of the reverse KL
divergence to the teacher. Groups with equal rewards are kept, because the teacher distinguishes their rollouts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from rstar_lab.rl.algorithm.config import LossConfig
from rstar_lab.rl.algorithm.hooks import ForwardPasses, ModelServer
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.algorithm.streams import Streams
from rstar_lab.rl.methods.base import MethodSection
from rstar_lab.rl.trajectory import Trajectory


class Distillation(MethodSection):
    """A method whose loss has a reverse KL to a teacher, by its policy gradient."""

    type: Literal["opd", "sdpo"]
    """Name of the method."""
    weight: float = Field(gt=0)
    """Weight of the difference of log-probs."""

    forward_phase: ClassVar[str | None] = "teacher_s"

    def loss_options(self, config: LossConfig) -> LossConfig:
        return replace(config, kl_coefficient=self.weight, kl_estimator="policy_gradient", kl_metric="teacher_kl")

    def check(self, rl: Any) -> None:
        if rl.method.kl_coefficient:
            raise ValueError(
                f"method.kl_coefficient cannot be combined with {self.type}: a step has one reference model; set it to 0"
            )


def teacher_server(engine: Any) -> Sequence[ModelServer]:
    """Return the server of `engine.teacher_url`, if it is set."""
    url = engine.teacher_url
    return () if url is None else (ModelServer("teacher", url, "engine.teacher_url"),)


class Opd(Distillation):
    """On-policy distillation (arXiv 2306.13649): adds weight * (log p_teacher - log p_student) to the advantage of each token.
    Groups with equal rewards are kept. Requires `engine.teacher_url`."""

    type: Literal["opd"] = "opd"
    """Name of the method."""

    equal_groups: ClassVar[Literal["drop", "cross_entropy", "train"]] = "train"
    reads_texts: ClassVar[bool] = True

    def servers(self, engine: Any) -> Sequence[ModelServer]:
        return teacher_server(engine)

    async def forward(self, selection: Selection, rollouts: Sequence[Trajectory], passes: ForwardPasses) -> Selection:
        teacher = await passes.teacher_log_probs(selection.trajectories)
        return selection.add([Streams(reference_log_prob_T=row) for row in teacher])

    def check(self, rl: Any) -> None:
        super().check(rl)
        if rl.temperature != 1.0:
            raise ValueError(
                f"method.add: opd requires temperature: 1, at which the teacher is scored; it is {rl.temperature:g}"
            )

    def check_recipe(self, recipe: Any, rl: Any) -> None:
        if recipe.engine.teacher_url is None:
            raise ValueError("method.add: opd requires engine.teacher_url, the teacher's server")
