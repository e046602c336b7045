"""Rollouts of a verl job outside of its training steps: the evaluations and the difficulty filter of a stage."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

import transfer_queue as tq

from rstar_lab.common.errors import UserError
from rstar_lab.rl.evaluation import Generate
from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.rl.verl.manager import OversamplingManager
from rstar_lab.rl.verl.sampler import RocReplayBuffer, fetch_rollouts

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
