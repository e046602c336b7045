"""Rewards that depend on a whole group, for environments with `score_group`."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rstar_lab.rl.environments.base import EnvironmentFailure
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.trajectory import StopReason, Trajectory

log = logging.getLogger(__name__)


async def score_groups(
    trajectories: Sequence[Trajectory], tasks: Sequence[RolloutTask], context: RolloutContext
) -> list[Trajectory]:
    """Return the rollouts, in the same order, with the rewards and metrics of `score_group` added.

    tasks: the tasks of these rollouts. If `score_group` fails, the rollouts of its group end with
    StopReason.ENVIRONMENT_ERROR.
    """
    problems = {task.group_id: task.problem for task in tasks}
    groups: dict[str, list[int]] = defaultdict(list)
    for index, trajectory in enumerate(trajectories):
        if trajectory.environment and trajectory.usable:
            groups[trajectory.group_id].append(index)
    scored = list(trajectories)
    for group_id, indices in groups.items():
        problem = problems[group_id]
        environment = context.of(problem).environment
        if environment is None or not environment.scores_groups:
            continue
        group = [trajectories[index] for index in indices]
        try:
            scores = await environment.score_group(problem, group)
        except EnvironmentFailure as failure:
            log.warning("%s", failure)
            for index in indices:
                scored[index] = replace(
                    trajectories[index], reward=0.0, stop_reason=StopReason.ENVIRONMENT_ERROR, error=str(failure)
                )
            continue
        for index, (reward, metrics) in zip(indices, scores, strict=True):
            before = trajectories[index]
            scored[index] = replace(before, reward=before.reward + reward, metrics={**before.metrics, **metrics})
    return scored
