"""The rollouts of a group in a worker of verl: when all have ended, failed ones are generated again and the group is scored."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.run import retry_failed, score_groups
from rstar_lab.rl.trajectory import Trajectory

Generate = Callable[[RolloutTask], Awaitable[Trajectory]]


class Group:
    """The rollouts of one group.

    Attributes:
        retried: number of further attempts, by traj_id.
    """

    def __init__(self, size: int, context: RolloutContext, retries: bool):
        """size: number of rollouts. context: that of all environments. retries: generate failed rollouts again, see `retry_failed`."""
        self.running, self.context, self.retries = size, context, retries
        self.retried = Counter[str]()
        self._ended: list[tuple[RolloutTask, Trajectory, Generate]] = []
        self._result: asyncio.Future[dict[str, Trajectory]] = asyncio.get_running_loop().create_future()

    async def run(self, task: RolloutTask, generate: Generate) -> Trajectory:
        """Generate a rollout and wait until the group has ended; return the rollout with the group's parts of its reward.

        The group is scored without a rollout that raises an exception.
        """
        try:
            self._ended.append((task, await generate(task), generate))
        finally:
            self.running -= 1
            if not self.running:
                await self._end()
        return (await self._result)[task.traj_id]

    async def _end(self) -> None:
        ended = sorted(self._ended, key=lambda one: one[0].sample)
        tasks, rollouts = [task for task, _, _ in ended], [trajectory for _, trajectory, _ in ended]
        generators = {task.traj_id: generate for task, _, generate in ended}

        async def again(failed: Sequence[RolloutTask]) -> list[Trajectory]:
            self.retried.update(task.traj_id for task in failed)
            return await asyncio.gather(*(generators[task.traj_id](task) for task in failed))

        try:
            if self.retries:
                rollouts, _ = await retry_failed(tasks, rollouts, again)
            found = await score_groups(rollouts, tasks, self.context)
        except BaseException as error:
            self._result.set_exception(error)
            raise
        self._result.set_result({trajectory.traj_id: trajectory for trajectory in found})


class Groups:
    """The groups of one worker that are in progress."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    def join(self, task: RolloutTask, context: RolloutContext, size: int, retries: bool) -> Group | None:
        """Return the group of a rollout that starts; None if nothing depends on the group. Arguments: see `Group`."""
        environment = context.of(task.problem).environment
        if not retries and (environment is None or not environment.scores_groups):
            return None
        self._groups = {name: group for name, group in self._groups.items() if group.running}
        return self._groups.setdefault(task.group_id, Group(size, context, retries))
