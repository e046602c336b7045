"""Run the rollouts of a step concurrently, each in its engine slot.

The slots decide where and when a turn is generated: `scheduling.slots` by the scheduler, while the tools of other rollouts run;
`scheduling.lockstep` in fixed batches, so that the results do not depend on timing.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.rl.engine import EngineSlot
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.branching import plan_branches
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.trajectory import StopReason, Trajectory


async def run_rollouts(
    tasks: Sequence[RolloutTask],
    context: RolloutContext,
    *,
    slots: Callable[[int, RolloutTask], EngineSlot],
    step_ended: asyncio.Event | None = None,
    carry_over: bool = False,
    on_rollout: Callable[[Trajectory], Any] | None = None,
    branching: float | None = None,
) -> list[Trajectory]:
    """Generate all rollouts concurrently and return them in the order of `tasks`.

    slots: gives the engine slot of a task, by its index. on_rollout: called with each rollout when it ends.
    step_ended: once this event is set, unfinished rollouts are cut off; with carry_over they are returned with
    StopReason.UNFINISHED, to be passed again as `partial` of their tasks. branching: `entropy` of the method `branching`.
    Raises UserError if the reward function fails.
    """
    started: list[EngineSlot] = []
    branches = plan_branches(tasks, branching)

    async def interrupt_at(step_ended: asyncio.Event) -> None:
        await step_ended.wait()
        for slot in started:
            slot.interrupt()

    async def run_task(index: int, task: RolloutTask) -> Trajectory:
        branch, child_of = branches.of_parent.get(task.traj_id), branches.of_child.get(task.traj_id)
        if child_of:
            await child_of.decided.wait()
            task = child_of.child
        if task.partial and task.partial.stop_reason is not StopReason.UNFINISHED:
            return task.partial
        slot = slots(index, task)
        started.append(slot)
        try:
            trajectory = await run_rollout(
                task, slot, context, on_turn=slot.on_turn, step_ended=step_ended, carry_over=carry_over, branch=branch
            )
        finally:
            slot.leave()
            if branch:
                branch.parent_ended()
        if child_of:
            trajectory = child_of.add_origin(trajectory)
        if on_rollout:
            on_rollout(trajectory)
        return trajectory

    interrupter = asyncio.create_task(interrupt_at(step_ended)) if step_ended else None
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run_task(index, task)) for index, task in enumerate(tasks)]
    except* UserError as errors:
        raise _first(errors) from None
    finally:
        if interrupter:
            interrupter.cancel()
    return [task.result() for task in running]


async def stream_rollouts(
    tasks: Iterable[RolloutTask],
    context: RolloutContext,
    *,
    slots: Callable[[int, RolloutTask], EngineSlot],
    max_in_flight: int,
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
    try:
        return await run_rollout(task, slot, context, on_turn=slot.on_turn)
    finally:
        slot.leave()


def _first(errors: BaseExceptionGroup) -> BaseException:
    """Return the first error of a nested group."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
