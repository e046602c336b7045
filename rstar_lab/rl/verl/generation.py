"""Rollouts outside of training steps under verl, on all inference servers of the job: evaluations and the difficulty filter."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

import transfer_queue as tq

from rstar_lab.errors import UserError
from rstar_lab.rl.evaluation import Generate
from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.training.stages import difficulty_file, filter_problems, filter_run
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.rl.verl.manager import OversamplingManager
from rstar_lab.rl.verl.sampler import RocReplayBuffer, fetch_rollouts
from rstar_lab.rl.verl.settings import Settings

PARTITION = "val"  # of the transfer queue
REFILLS = 8  # the window is refilled when this part of it has finished


class ServerRollouts:
    """Generates rollouts with the agent-loop workers of a job.

    window: rollouts in flight. New ones start whenever some have finished, so that the servers do not wait for the slowest.
    """

    def __init__(self, manager: OversamplingManager, buffer: RocReplayBuffer, window: int):
        self.manager, self.buffer, self.window = manager, buffer, window

    def generator(
        self, run: str, *, step: int, training: bool, on_progress: Callable[[], None] = lambda: None
    ) -> Generate:
        """Return the generator of the rollouts of run `run`, for `store_evaluation`.

        step: training step whose weights the servers hold. training: sample with the settings of the stage, not those of
        `evaluate`. on_progress: called whenever rollouts have finished.
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
                        self.manager.generate_evaluation(new, run=run, samples=samples, step=step, training=training)
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


def filter_stage(settings: Settings, rollouts: ServerRollouts, *, on_progress: Callable[[], None]) -> None:
    """Write the difficulty table of the stage, if it has a filter and the table is missing.

    Raises UserError if a rollout fails; the same call generates only the rollouts that are not stored.
    """
    stage, step = settings.stage, settings.first_step - 1
    if stage.filter is None or difficulty_file(settings.run_dir, stage.name).exists():
        return
    run = filter_run(settings.run, stage.name)
    generate = rollouts.generator(run, step=step, training=True, on_progress=on_progress)
    asyncio.run(
        filter_problems(
            settings.problems, stage.filter, generate,
            stage=stage.name, step=step, recipe=settings.recipe, run_dir=settings.run_dir,
        )
    )  # fmt: skip
