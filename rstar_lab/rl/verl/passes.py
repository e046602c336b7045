"""Forward passes of verl's trainer for the methods that need them before the update."""

from collections.abc import Sequence

import numpy as np

from rstar_lab.errors import UserError
from rstar_lab.rl.algorithm.hooks import TokenStatistics
from rstar_lab.rl.training.teacher import Teacher
from rstar_lab.rl.trajectory import Trajectory


class VerlPasses:
    """Implements `hooks.ForwardPasses`. Only the teacher is supported: verl's workers score the rows of the batch, with
    the prompts that the rollouts had, and return no sums over the vocabulary."""

    max_tokens = 0

    def __init__(self, teacher: Teacher | None):
        self.teacher = teacher

    async def statistics(self, rollouts: Sequence[Trajectory]) -> TokenStatistics:
        raise UserError("verl does not support methods that need forward passes of the policy; use the local trainer")

    async def log_probs(self, rollouts: Sequence[Trajectory]) -> list[np.ndarray]:
        raise UserError("verl does not support methods that need forward passes of the policy; use the local trainer")

    async def teacher_log_probs(self, rollouts: Sequence[Trajectory]) -> list[np.ndarray]:
        if self.teacher is None:
            raise UserError("engine.teacher_url: the method requires a teacher; set its address")
        return await self.teacher.score(rollouts)

    def prompt_ids(self, rollout: Trajectory, question: str) -> list[int]:
        raise UserError("verl does not support methods that change a prompt; use the local trainer")
