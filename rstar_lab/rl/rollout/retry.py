"""Rollouts that failed through no fault of the model: a second attempt, and a pause while most of them fail."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.trajectory import StopReason, Trajectory

PAUSE_FROM = 0.5  # share of failed rollouts from which the cause is the infrastructure as a whole
FIRST_PAUSE_S, LONGEST_PAUSE_S, MOST_PAUSES = 5.0, 300.0, 20  # about 80 minutes in all

log = logging.getLogger(__name__)


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
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> tuple[list[Trajectory], int]:
    """Generate failed rollouts once more; return all rollouts, and the number of further attempts.

    While tool calls of at least PAUSE_FROM of the rollouts fail, the run pauses, for longer each time, and tries again:
    otherwise a sandbox that is down for an hour would use up the problems. It goes on when the cause is gone.

    Args:
        tasks: tasks of the rollouts.
        rollouts: their results.
        run: generates rollouts.
        sleep: waits for a number of seconds.
    """
    found, attempts, attempt, pause_s = [*rollouts], 0, 0, FIRST_PAUSE_S
    while True:
        finished = {i: rollout for i, rollout in enumerate(found) if rollout.stop_reason is not StopReason.UNFINISHED}
        reasons = {i: reason for i, rollout in finished.items() if (reason := failure(rollout)) is not None}
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
            await sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        attempt += 1
        attempts += len(failed)
        for i, rollout in zip(failed, await run([retry_task(tasks[i], attempt) for i in failed]), strict=True):
            found[i] = rollout
