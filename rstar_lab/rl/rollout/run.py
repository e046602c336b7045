"""Run the rollouts of a step concurrently, each in its engine slot; try failed ones again; add the rewards of whole groups.

The slots decide where and when a turn is generated: `scheduling.slots` by the scheduler, while the tools of other rollouts run, or
in fixed batches (lockstep), so that the results do not depend on timing."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.rl.engine import EngineSlot, Slots, SlotWrapper
from rstar_lab.rl.environments.base import EnvironmentFailure
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.trajectory import StopReason, Trajectory

PAUSE_FROM = 0.5  # share of failed rollouts from which the cause is the infrastructure as a whole
FIRST_PAUSE_S, LONGEST_PAUSE_S, MOST_PAUSES = 5.0, 300.0, 20  # about 80 minutes in all

log = logging.getLogger(__name__)


async def run_rollouts(
    tasks: Sequence[RolloutTask],
    context: RolloutContext,
    *,
    slots: Slots,
    on_rollout: Callable[[Trajectory], Any] | None = None,
) -> list[Trajectory]:
    """Generate all rollouts concurrently and return them in the order of `tasks`.

    slots: gives the engine slot of a task, by its index. on_rollout: called with each rollout when it ends.
    Raises UserError if the reward function fails.
    """

    async def run_task(index: int, task: RolloutTask) -> Trajectory:
        trajectory = await _run_in_slot(task, slots(index, task), context)
        if on_rollout:
            on_rollout(trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run_task(index, task)) for index, task in enumerate(tasks)]
    except* UserError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]


async def stream_rollouts(
    tasks: Iterable[RolloutTask], context: RolloutContext, *, slots: Slots, max_in_flight: int
) -> AsyncGenerator[Trajectory]:
    """Generate rollouts with at most `max_in_flight` at a time and yield each when it ends.

    A new rollout starts whenever one ends, so that the others do not wait for a slow one. Raises UserError if the
    reward function fails.
    """
    waiting = enumerate(tasks)
    running: set[asyncio.Task[Trajectory]] = set()
    try:
        while True:
            for index, task in islice(waiting, max_in_flight - len(running)):
                running.add(asyncio.create_task(_run_in_slot(task, slots(index, task), context)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for finished in done:
                yield finished.result()
    finally:
        for task_in_flight in running:
            task_in_flight.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _run_in_slot(task: RolloutTask, slot: EngineSlot, context: RolloutContext) -> Trajectory:
    wrapped = slot if isinstance(slot, SlotWrapper) else SlotWrapper(slot)
    task = await wrapped.begin(task)
    try:
        rollout = await run_rollout(task, wrapped, context, on_turn=wrapped.on_turn, on_written=wrapped.on_written)
    finally:
        wrapped.leave()
    return wrapped.finish(rollout)


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


def failure(trajectory: Trajectory) -> str | None:
    """Return why a rollout failed through no fault of the model: an outcome or a stop reason; None if it did not."""
    if trajectory.stop_reason in (StopReason.ENGINE_ERROR, StopReason.ENVIRONMENT_ERROR):
        return str(trajectory.stop_reason)
    outcome = trajectory.infrastructure_failure
    return None if outcome is None else str(outcome)


def retry_task(task: RolloutTask, attempt: int) -> RolloutTask:
    """Return the task of a further attempt at a rollout: the same rollout with another seed, from its prompt."""
    return replace(task, seed=derive_seed(task.seed, "retry", attempt), partial=None)


async def retry_failed(
    tasks: Sequence[RolloutTask],
    rollouts: Sequence[Trajectory],
    run: Callable[[Sequence[RolloutTask]], Awaitable[Sequence[Trajectory]]],
) -> tuple[list[Trajectory], int]:
    """Generate failed rollouts once more; return all rollouts, and the number of further attempts.

    While tool calls of at least PAUSE_FROM of the rollouts fail, the run pauses, for longer each time, and tries again:
    otherwise a sandbox that is down for an hour would use up the problems. It goes on when the cause is gone.

    tasks: tasks of the rollouts. rollouts: their results. run: generates rollouts.
    """
    found, attempts, attempt, pause_s = [*rollouts], 0, 0, FIRST_PAUSE_S
    while True:
        reasons = {i: reason for i, rollout in enumerate(found) if (reason := failure(rollout)) is not None}
        failed = [*reasons]
        # An engine or an environment that fails is reported elsewhere: it may be a fault that no pause removes.
        of_tools = sum(found[i].infrastructure_failure is not None for i in failed)
        paused = of_tools >= max(2, PAUSE_FROM * len(found)) and attempt < MOST_PAUSES
        if not failed or (attempt and not paused):
            return found, attempts
        if attempt and paused:
            counts = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons.values()).most_common())
            log.warning(
                "%d of %d rollouts failed through no fault of the model (%s): paused for %.0f s, then they are tried again",
                len(failed), len(found), counts, pause_s,
            )  # fmt: skip
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        attempt += 1
        attempts += len(failed)
        for i, rollout in zip(failed, await run([retry_task(tasks[i], attempt) for i in failed]), strict=True):
            found[i] = rollout
