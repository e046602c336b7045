"""The rollouts of each training step: generated within the step (sync), or in the background of the updates."""

import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.engine import Engine, Slots
from rstar_lab.rl.engines.group import EngineGroup
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import RlSection, Stage
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.plan import parse_group_name, rollout_task
from rstar_lab.rl.rollout.run import retry_failed, run_rollouts, score_groups
from rstar_lab.rl.step import Sampled, select
from rstar_lab.rl.training.checkpoint import TrainerState
from rstar_lab.rl.training.group_stream import GroupStream, trim, updates_since
from rstar_lab.rl.trajectory import Trajectory


def wrapped_slots(slots: Slots, tasks: Sequence[RolloutTask], rl: RlSection, servers: Mapping[str, Engine]) -> Slots:
    """Return the engine slots of rollouts as the methods of a step change them."""
    for method in rl.hooks:
        slots = method.wrap_slots(slots, tasks, servers)
    return slots


@dataclass(eq=False)
class RolloutSource:
    """Draws problems and generates their groups, for one run.

    seed, run: seed and id of the run. context: returns the context of a stage's rollouts. load: sends the trainer's weights to the
    engines under a version number. servers: engines of the servers that the methods need, by name. versions: those of the
    trainer's weights, in order, since the start or the resume; a step without an update adds none.
    """

    seed: int
    run: str
    engines: EngineGroup
    context: Callable[[RlSection], RolloutContext]
    load: Callable[[int], Awaitable[None]]
    servers: Mapping[str, Engine] = field(default_factory=dict)
    state: TrainerState = field(default_factory=TrainerState)
    versions: list[int] = field(default_factory=lambda: [0])
    retried: int = 0  # further attempts at failed rollouts since the last step
    stream: GroupStream | None = None  # stream of the current stage; None in mode sync

    async def next_step(self, stage: str, rl: RlSection, pool: Sequence[Problem], step: int, seed: int) -> Sampled:
        """Return the rollouts of a step. In the modes one_step_off and async they are taken from the stream."""
        if self.stream is None:
            trajectories, selection, groups = await self.collect(stage, rl, pool, step, seed)
            return Sampled(trajectories, selection, groups, self._retried())
        buffered = await self.stream.take()
        if rl.schedule.type == "one_step_off":
            # No request is in flight now. The next batch starts with the weights before this update.
            await self.load_newest(self.stream)
        trajectories = [t for group in buffered.used for t in group]
        selection = select(trajectories, rl, seed)
        if rl.schedule.type == "async" and rl.schedule.when_stale == "trim":
            selection, trimmed = trim(selection, lambda v: self.staleness(v) > rl.asynchronous.max_staleness)
            buffered = replace(buffered, trimmed_tokens=trimmed)
        return Sampled(trajectories, selection, len(buffered.used), self._retried(), buffered)

    def _retried(self) -> int:
        retried, self.retried = self.retried, 0
        return retried

    async def collect(
        self, stage: str, rl: RlSection, pool: Sequence[Problem], step: int, seed: int
    ) -> tuple[list[Trajectory], Selection, int]:
        """Generate and select the rollouts of a step; return (all rollouts, selection, number of groups started).

        With dynamic_sampling, groups without signal are replaced by further problems, for that many rounds.
        """
        trajectories = await self.generate(self.draw(stage, rl.problems_per_step, pool, rl), rl, step)
        selection = select(trajectories, rl, seed)
        groups = rl.problems_per_step
        for _ in range(rl.sync.dynamic_sampling):
            missing = rl.problems_per_step - selection.groups
            if not missing:
                break
            trajectories += await self.generate(self.draw(stage, missing, pool, rl), rl, step, first_group=groups)
            selection = select(trajectories, rl, seed)
            groups += missing
        return trajectories, selection, groups

    async def generate(
        self, problems: Sequence[Problem], rl: RlSection, step: int, first_group: int = 0
    ) -> list[Trajectory]:
        """Generate the rollouts of these problems. first_group: number of the first group in the step."""
        tasks = [
            task
            for number, problem in enumerate(problems, start=first_group)
            for task in self.group_tasks(problem, rl, step, number)
        ]
        context = self.context(rl)
        slots = partial(self.engines.slots, mode=rl.rollout_mode, max_response_tokens=rl.limits.max_response_tokens)

        async def run(tasks: Sequence[RolloutTask]) -> list[Trajectory]:
            return await run_rollouts(tasks, context, slots=wrapped_slots(slots(tasks), tasks, rl, self.servers))

        rollouts = await self.retry(tasks, await run(tasks), run, rl)
        return await score_groups(rollouts, tasks, context)

    async def retry(
        self,
        tasks: Sequence[RolloutTask],
        rollouts: list[Trajectory],
        run: Callable[[Sequence[RolloutTask]], Awaitable[list[Trajectory]]],
        rl: RlSection,
    ) -> list[Trajectory]:
        """Return the rollouts with further attempts at those that failed through no fault of the model, if the recipe allows
        it. run: generates rollouts."""
        if rl.on_infrastructure_failure != "retry":
            return rollouts
        rollouts, attempts = await retry_failed(tasks, rollouts, run)
        self.retried += attempts
        return rollouts

    def draw(self, stage: str, count: int, pool: Sequence[Problem], rl: RlSection) -> list[Problem]:
        """Return the next problems of the stage and advance its position."""
        return self.state.draw(pool, count, rl, seed=self.seed, stage=stage)

    def group_tasks(self, problem: Problem, rl: RlSection, step: int, number: int) -> list[RolloutTask]:
        """Return the rollouts of one group, before selection."""
        return [
            rollout_task(problem, run=self.run, seed=self.seed, step=step, group=number, sample=sample)
            for sample in range(rl.rollouts_per_group)
        ]

    # In the background

    @asynccontextmanager
    async def background(self, stage: Stage, rl: RlSection, pool: Sequence[Problem]) -> AsyncIterator[None]:
        """Generate groups in the background of the remaining steps of a stage, if its mode requires it."""
        if rl.schedule.type == "sync":
            yield
            return
        problems = {problem.problem_id: problem for problem in pool}
        # Groups that were in flight at the checkpoint. Their tokens are not stored, so they start again.
        restart = [(*parse_group_name(group_id), problems[name]) for group_id, name in self.state.carried]
        numbers: dict[int, int] = defaultdict(int)  # groups started, by step
        indices = itertools.count()
        slot = self.engines.slots([], "async", rl.limits.max_response_tokens)
        context = self.context(rl)

        def next_group() -> list[RolloutTask] | None:
            if restart:
                step, number, problem = restart.pop(0)
                return self.group_tasks(problem, rl, step, number)
            retired = set(self.state.retired)
            if all(problem.problem_id in retired for problem in pool):
                return None
            step = self.state.step + 1
            numbers[step] += 1
            (problem,) = self.draw(stage.name, 1, pool, rl)
            return self.group_tasks(problem, rl, step, numbers[step] - 1)

        async def run_group(tasks: list[RolloutTask]) -> list[Trajectory]:
            async def run(tasks: Sequence[RolloutTask]) -> list[Trajectory]:
                slots = wrapped_slots(lambda _, task: slot(next(indices), task), tasks, rl, self.servers)
                return await run_rollouts(tasks, context, slots=slots)

            rollouts = await self.retry(tasks, await run(tasks), run, rl)
            return await score_groups(rollouts, tasks, context)

        self.stream = stream = GroupStream(
            next_group,
            run_group,
            batch_groups=rl.problems_per_step,
            max_staleness=1 if rl.schedule.type == "one_step_off" else rl.asynchronous.max_staleness,
            when_stale=rl.asynchronous.when_stale,
            buffer_groups=rl.asynchronous.groups(rl.problems_per_step),
            capacity=self.engines.max_batch * len(self.engines.engines),
            last_group=(stage.steps - self.state.stage_step) * rl.problems_per_step,
            whole_batches=rl.schedule.type == "one_step_off",
            version=self.versions[-1],
            staleness=self.staleness,
        )
        try:
            stream.fill()
            yield
        finally:
            self.stream = None
            for group in await stream.aclose():
                for task in group.tasks:  # it will not be continued
                    await context.of(task.problem).close(task.traj_id)
        if stream.version != self.versions[-1]:
            await self.load(self.versions[-1])

    async def load_newest(self, stream: GroupStream) -> None:
        """Send the newest weights to the engines if they do not have them, and start further groups."""
        if stream.version != self.versions[-1]:
            await self.load(self.versions[-1])
        stream.loaded(self.versions[-1])

    async def newest_in_engines(self, stream: GroupStream) -> None:
        """Make the engines serve the newest weights. In mode one_step_off, wait for the batch in flight, which has older ones."""
        if stream.version != self.versions[-1]:
            await stream.settle()
            await self.load(self.versions[-1])
            stream.version = self.versions[-1]

    def staleness(self, version: int) -> int:
        """Return the number of updates between the weights of a version and the newest."""
        return updates_since(version, self.versions)
