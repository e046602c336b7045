"""Forward passes of the local trainer for the methods that need them before the update."""

import asyncio
from collections.abc import Sequence

import numpy as np

from rstar_lab.errors import UserError
from rstar_lab.rl.algorithm.hooks import TokenStatistics
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.rollout.context import RolloutContext
from rstar_lab.rl.training.teacher import Teacher
from rstar_lab.rl.training.update import Learner
from rstar_lab.rl.trajectory import Trajectory


class LocalPasses:
    """Implements `hooks.ForwardPasses` with the learner of this process."""

    def __init__(self, learner: Learner, rl: RlSection, context: RolloutContext, teacher: Teacher | None):
        self.learner, self.rl, self.context, self.teacher = learner, rl, context, teacher
        self.max_tokens: int = learner.model.config.max_position_embeddings

    async def statistics(self, rollouts: Sequence[Trajectory]) -> TokenStatistics:
        return await asyncio.to_thread(self.learner.statistics, rollouts, self.rl, squares=True)

    async def log_probs(self, rollouts: Sequence[Trajectory]) -> list[np.ndarray]:
        return (await asyncio.to_thread(self.learner.statistics, rollouts, self.rl)).log_probs

    async def teacher_log_probs(self, rollouts: Sequence[Trajectory]) -> list[np.ndarray]:
        if self.teacher is None:
            raise UserError("engine.teacher_url: the method requires a teacher; set its address")
        return await self.teacher.score(rollouts)

    def prompt_ids(self, rollout: Trajectory, question: str) -> list[int]:
        context = self.context.others[rollout.environment] if rollout.environment else self.context
        return context.codec.prompt_ids(question)
