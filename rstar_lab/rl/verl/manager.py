"""verl's agent-loop manager, with the problems and the number of rollouts of the recipe, and the rollouts of a job outside of its
training steps: evaluations and the difficulty filter of a stage."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import ray
import transfer_queue as tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils import tensordict_utils

from rstar_lab.common.errors import UserError
from rstar_lab.rl.evaluation import Generate
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.rollout.plan import group_name, parse_group_name
from rstar_lab.rl.training.checkpoint import TrainerState
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.rl.verl.engine import ScheduledClient
from rstar_lab.rl.verl.sampler import RocReplayBuffer, fetch_rollouts
from rstar_lab.rl.verl.settings import Settings

PARTITION = "val"  # of the transfer queue, for rollouts outside of steps
REFILLS = 8  # the window is refilled when this part of it has finished


class OversamplingManager(AgentLoopManagerTQ):
    """Assigns a problem to each prompt of a step and rolls it out `oversample * rollout.n` times.

    verl's data set contains placeholder rows. The problems of a step are a function of the recipe and of `state`, which the
    trainer sets and stores in its checkpoints, as the local trainer does. `rollout.n` stays the number of kept rollouts,
    because verl derives the size of mini-batches from it.

    open: groups that were started and that no update has used: group id -> problem id. restart: (group id, problem id) of
    the groups that were open at the checkpoint. They start first, under their old ids.
    """

    llm_client: ScheduledClient

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.settings = Settings.of(self.config.rstar)
        self.state = TrainerState()
        self.step, self.sent = -1, 0
        self.open: dict[str, str] = {}
        self.restart: list[tuple[str, str]] = []

    def resume(self, state: TrainerState) -> None:
        """Take over the trainer's state and the groups that were open at its checkpoint."""
        self.state, self.restart = state, list(state.carried)

    def unused(self) -> list[tuple[str, str]]:
        """Return (group id, problem id) of the groups that no update has used, for `TrainerState.carried`."""
        return [*self.open.items(), *self.restart]

    def close_groups(self, rollouts: Sequence[Trajectory]) -> None:
        """Remove the groups of these rollouts from `open`: an update has used them, or they were dropped as too old."""
        for name in {rollout.group_id for rollout in rollouts}:
            self.open.pop(name, None)

    def generate_sequences(self, prompts: Any) -> None:
        settings = self.settings
        step = int(prompts["global_steps"])
        if step != self.step:
            self.step, self.sent = step, 0
            rollouts = settings.rl.problems_per_step * settings.rl.rollouts_per_group
            # Other groups run in mode async, so the first dispatch of a step must not wait for the new ones.
            self.begin_step(rollouts if settings.rl.schedule.type == "sync" else 0)
        groups = self._open_groups(len(prompts))
        for name, values in (
            ("group_step", [start for start, _, _ in groups]),
            ("group", [number for _, number, _ in groups]),
            ("problem", [problem.model_dump() for _, _, problem in groups]),
        ):
            tensordict_utils.assign_non_tensor_stack(prompts, name, values)
        tensordict_utils.assign_non_tensor_data(prompts, "__rollout_n__", settings.rl.rollouts_per_group)
        super().generate_sequences(prompts)

    def _open_groups(self, count: int) -> list[tuple[int, int, Problem]]:
        """Add the next groups to `open` and return their (step, number, problem): first those of the checkpoint, then new ones."""
        settings, state = self.settings, self.state
        groups = []
        if self.restart:
            problem_of = {problem.problem_id: problem for problem in settings.pool}
            groups = [(*parse_group_name(name), problem_of[problem]) for name, problem in self.restart[:count]]
            self.restart = self.restart[count:]
        new = count - len(groups)
        problems = state.draw(settings.pool, new, settings.rl, seed=settings.recipe.seed, stage=settings.stage.name)
        groups += [(self.step, number, problem) for number, problem in enumerate(problems, start=self.sent)]
        self.sent += new
        self.open |= {group_name(start, number): problem.problem_id for start, number, problem in groups}
        return groups

    def begin_step(self, rollouts: int) -> None:
        """Tell the scheduler that this many rollouts follow."""
        ray.get(self.llm_client.scheduler.begin_step.remote(rollouts))

    def generate_evaluation(
        self, problems: Sequence[Problem], *, run: str, samples: int, step: int, sampling: str
    ) -> None:
        """Roll out problems outside of a step, `samples` times each, into PARTITION of the transfer queue.

        run: id of the run that stores the rollouts, which their traj_ids contain. step: training step whose weights the
        servers hold. sampling: settings of the rollouts: `stage`, `during` (evaluate.during) or `model` (evaluate).
        """
        count = len(problems)
        uids = [str(uuid4()) for _ in problems]
        rows = {"uid": uids, "agent_name": ["rstar"] * count, "data_source": ["rstar_lab"] * count}
        prompts = tensordict_utils.get_tensordict(
            {name: np.array(values, dtype=object) for name, values in rows.items()} | {"index": np.arange(count)}
        )
        tensordict_utils.assign_non_tensor_stack(prompts, "problem", [problem.model_dump() for problem in problems])
        for name, value in (
            ("global_steps", step), ("validate", True), ("evaluation", run), ("sampling", sampling), ("samples", samples),
            ("__rollout_n__", samples),
        ):  # fmt: skip
            tensordict_utils.assign_non_tensor_data(prompts, name, value)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": step}] * count
        tq.kv_batch_put(keys=uids, partition_id=PARTITION, tags=tags)
        super().generate_sequences(prompts)


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
