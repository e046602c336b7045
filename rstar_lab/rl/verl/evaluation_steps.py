"""Rollouts of a verl job outside of its training steps: the evaluations and the difficulty filter of a stage."""

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

import transfer_queue as tq

from rstar_lab.common.errors import UserError
from rstar_lab.rl.evaluation import Generate
from rstar_lab.rl.pipeline import evaluate_sets
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.session import RunSession
from rstar_lab.rl.training.stages import difficulty_file, filter_problems, filter_run
from rstar_lab.rl.training.trainer import HeldOut
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.rl.verl.manager import OversamplingManager
from rstar_lab.rl.verl.sampler import RocReplayBuffer, RocReplayBufferAsync, fetch_rollouts
from rstar_lab.rl.verl.settings import Settings
from rstar_lab.rl.verl.watchdog import Watchdog
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.writer import RunWriter

PARTITION = "val"  # of the transfer queue
REFILLS = 8  # the window is refilled when this part of it has finished


class ServerRollouts:
    """Generates rollouts with the agent-loop workers of a job.

    window: rollouts in flight. New ones start whenever some have finished, so that the servers do not wait for the slowest.
    """

    def __init__(self, manager: OversamplingManager, buffer: RocReplayBuffer, window: int):
        self.manager, self.buffer, self.window = manager, buffer, window

    def generator(
        self, run: str, *, step: int, sampling: str, on_progress: Callable[[], None] = lambda: None
    ) -> Generate:
        """Return the generator of the rollouts of run `run`, for `store_evaluation`.

        step: training step whose weights the servers hold. sampling: settings of the rollouts: `stage`, `during`
        (evaluate.during) or `model` (evaluate). on_progress: called whenever rollouts have finished.
        """

        async def generate(chunks: Sequence[list[RolloutTask]]) -> AsyncGenerator[list[Trajectory]]:
            problems = {task.problem.problem_id: task.problem for tasks in chunks for task in tasks}
            if not problems:
                return
            samples = sum(map(len, chunks)) // len(problems)
            waiting, in_flight = deque(problems.values()), 0
            most = max(1, self.window // samples)
            part = max(len(self.manager.agent_loop_workers), most // REFILLS)
            found: dict[str, Trajectory] = {}
            self.manager.begin_step(len(problems) * samples)
            for tasks in chunks:
                while not all(task.traj_id in found for task in tasks):
                    if new := [waiting.popleft() for _ in range(min(most - in_flight, len(waiting)))]:
                        self.manager.generate_evaluation(new, run=run, samples=samples, step=step, sampling=sampling)
                        in_flight += len(new)
                    count = min(part, in_flight)
                    trajectories = await asyncio.to_thread(self._take, count, step)
                    if len(trajectories) < count * samples:
                        raise UserError(f"{run}: a rollout failed; the log of the agent-loop workers has the cause")
                    in_flight -= count
                    found |= {trajectory.traj_id: trajectory for trajectory in trajectories}
                    on_progress()
                yield [found.pop(task.traj_id) for task in tasks]

        return generate

    def _take(self, groups: int, step: int) -> list[Trajectory]:
        """Wait until this many groups have finished; remove them from the transfer queue and return their rollouts."""
        batch, _ = self.buffer.sample(global_steps=step, partition_id=PARTITION, batch_size=groups)
        rollouts = fetch_rollouts(batch.keys, PARTITION)
        if batch.keys:
            tq.kv_clear(keys=batch.keys, partition_id=PARTITION)
        return rollouts


class EvaluationSteps:
    """Mixin of `trainer.RecipeTrainer` that evaluates and filters the problems of a stage."""

    settings: Settings
    session: RunSession
    watchdog: Watchdog
    writer: RunWriter
    agent_loop_manager: OversamplingManager
    replay_buffer: RocReplayBuffer | RocReplayBufferAsync
    global_steps: int

    @abstractmethod
    def _begin_evaluation(self) -> None:
        """Make the servers generate with the weights after this step."""

    @abstractmethod
    def _end_evaluation(self) -> None:
        """Restore the state that the servers have between the rollouts and the end of a step."""

    @property
    def other_rollouts(self) -> ServerRollouts:
        """The generator of rollouts outside of steps. It keeps as many rollouts in flight as one step has."""
        window = self.settings.rl.problems_per_step * self.settings.rl.rollouts_per_group
        return ServerRollouts(self.agent_loop_manager, self.replay_buffer, window)

    def _begin_stage(self) -> None:
        """Evaluate the model that RL starts from before the first step, and write the difficulty table of the stage's filter.

        Raises UserError if a rollout fails; a resumed run generates only the rollouts that are not stored.
        """
        settings, step = self.settings, self.settings.first_step - 1
        if self.global_steps == 0 and settings.first_step == 1:
            self._evaluate_served("sft" if settings.recipe.sft else "base")
        stage = settings.stage
        if stage.filter is None or difficulty_file(settings.run_dir, stage.name).exists():
            return
        self.watchdog.enter("filter", step)
        run, on_progress = filter_run(settings.run, stage.name), partial(self.watchdog.enter, "filter", step)
        generate = self.other_rollouts.generator(run, step=step, sampling="stage", on_progress=on_progress)
        asyncio.run(
            filter_problems(
                settings.problems, stage.filter, generate,
                stage=stage.name, step=step, recipe=settings.recipe, run_dir=settings.run_dir,
            )
        )  # fmt: skip
        self.watchdog.leave()

    def _evaluate(self, model: str | None = None) -> HeldOut:
        """Evaluate the recipe's sets with the weights after this step. model: see `evaluate_sets`."""
        if not self.session.held_out:
            return {}
        self.watchdog.enter("evaluation", self.global_steps)
        self._begin_evaluation()
        held_out = self._evaluate_served(model)
        self._end_evaluation()
        self.watchdog.enter("update", self.global_steps)
        return held_out

    def _evaluate_served(self, model: str | None) -> HeldOut:
        """Evaluate the weights that the servers hold. A model that is evaluated already is not evaluated again."""
        session, step = self.session, self.global_steps
        runs = [session.runs_dir / session.run_id(f"{name}-{model}") for name in session.held_out]
        if model and all((run / "run.json").exists() and RunReader(run).status == "finished" for run in runs):
            return {}

        def rollouts_of(problems: Sequence[Problem], run: str) -> Generate:
            on_progress = partial(self.watchdog.enter, "evaluation", step)
            sampling = "model" if model else "during"
            return self.other_rollouts.generator(run, step=step, sampling=sampling, on_progress=on_progress)

        return asyncio.run(evaluate_sets(session, rollouts_of, parent=self.writer.run_dir.name, step=step, model=model))
