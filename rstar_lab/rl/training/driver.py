"""The part of a step that the local trainer and `TrainingLoop` share: forward passes and updates in this process."""

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rstar_lab.rl.algorithm.hooks import TokenStatistics
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.models.config_facts import context_length
from rstar_lab.rl.models.gpu import is_gpu
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.rollout.context import RolloutContext
from rstar_lab.rl.step import Sampled, Update, lr_scale
from rstar_lab.rl.training.teacher import TeacherPasses
from rstar_lab.rl.training.update import Learner
from rstar_lab.rl.trajectory import Trajectory


class LocalPasses(TeacherPasses):
    """Implements `hooks.ForwardPasses` with the learner of this process."""

    def __init__(self, learner: Learner, rl: RlSection, context: RolloutContext, teacher: Any):
        super().__init__(teacher)
        self.learner, self.rl, self.context = learner, rl, context
        self.max_tokens = context_length(learner.model.config) or 2**20

    async def statistics(self, rollouts: Sequence[Trajectory]) -> TokenStatistics:
        return await asyncio.to_thread(self.learner.statistics, rollouts, self.rl, squares=True)

    async def log_probs(self, rollouts: Sequence[Trajectory]) -> list[np.ndarray]:
        return (await asyncio.to_thread(self.learner.statistics, rollouts, self.rl)).log_probs

    def prompt_ids(self, rollout: Trajectory, question: str) -> list[int]:
        context = self.context.others[rollout.environment] if rollout.environment else self.context
        return context.codec.prompt_ids(question)


@dataclass(eq=False)
class LocalDriver:
    """Implements `step.Driver` for one step, without `sample` and `sync`.

    learner: the model and its optimizer. rl: settings of the stage. context: of the rollouts. servers: engines of the servers that
    the methods need, by name. seed: of the step. mismatch_limit, version: see `Driver`. stage_step: steps of the stage before this
    one. in_thread: whether the update runs in a thread, so that rollouts in flight continue.
    """

    learner: Learner
    rl: RlSection
    context: RolloutContext
    servers: Mapping[str, Any]
    seed: int
    mismatch_limit: float | None
    stage_step: int
    in_thread: bool = True
    version: int | None = None

    @abstractmethod
    async def sample(self) -> Sampled: ...

    @abstractmethod
    async def sync(self) -> None: ...

    def passes(self) -> LocalPasses:
        return LocalPasses(self.learner, self.rl, self.context, self.servers.get("teacher"))

    async def update(self, selection: Selection) -> Update:
        device = self.learner.device
        if on_gpu := is_gpu(device):
            torch.cuda.reset_peak_memory_stats(device)
        update = await asyncio.to_thread(self._update, selection) if self.in_thread else self._update(selection)
        return replace(update, gpu_gb=torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else None)

    def _update(self, selection: Selection) -> Update:
        scale = lr_scale(self.stage_step, self.rl.warmup_steps)
        return self.learner.update(selection, self.rl, lr_scale=scale, seed=self.seed)
