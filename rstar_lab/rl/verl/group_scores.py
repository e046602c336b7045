"""Rewards that depend on a whole group (`score_group`), in verl's workers.

verl generates all rollouts of a group in one worker process. The group is scored there when its last rollout has ended.
"""

import asyncio

from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.groups import score_groups
from rstar_lab.rl.trajectory import Trajectory


class Group:
    """The rollouts of one group. size: their number."""

    def __init__(self, size: int, context: RolloutContext):
        self.running, self.context = size, context
        self.ended: list[tuple[RolloutTask, Trajectory]] = []
        self.result: asyncio.Future[dict[str, Trajectory]] = asyncio.get_running_loop().create_future()

    async def scored(self, task: RolloutTask, trajectory: Trajectory) -> Trajectory:
        """Wait until the group has ended; return the rollout with the group's parts of its reward added."""
        self.ended.append((task, trajectory))
        await self.leave()
        return (await self.result)[task.traj_id]

    async def leave(self) -> None:
        """Count a rollout as ended. Called directly for a rollout that raised an exception: the group is scored without it."""
        self.running -= 1
        if self.running:
            return
        pairs = sorted(self.ended, key=lambda pair: pair[0].sample)
        try:
            found = await score_groups([pair[1] for pair in pairs], [pair[0] for pair in pairs], self.context)
        except BaseException as error:
            self.result.set_exception(error)
            raise
        self.result.set_result({trajectory.traj_id: trajectory for trajectory in found})


class GroupScores:
    """The groups of one worker that are in progress and whose environment scores groups."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    def join(self, task: RolloutTask, context: RolloutContext, size: int) -> Group | None:
        """Return the group of a rollout that starts; None if its environment does not score groups.

        context: that of all environments. size: number of rollouts in the group.
        """
        environment = context.of(task.problem).environment
        if environment is None or not environment.scores_groups:
            return None
        self._groups = {name: group for name, group in self._groups.items() if group.running}
        return self._groups.setdefault(task.group_id, Group(size, context))
