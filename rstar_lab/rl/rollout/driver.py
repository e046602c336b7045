"""Concurrent rollouts over several engines, in one of two modes.

Asynchronous: a dispatch policy decides which turn goes to which engine and when; tools run while other rollouts
generate. Lockstep (lockstep.py): turns are generated in fixed batches, so that the results do not depend on timing.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from rstar_lab.errors import UserError
from rstar_lab.rl.engine import Completion, Engine, EngineError, FinishReason, Interruptible, RequestRefused, Sampling
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.branching import plan_branches
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.scheduling.base import DispatchPolicy, EngineState, TurnRequest
from rstar_lab.rl.trajectory import StopReason, Trajectory


class EngineSlot(Engine, Protocol):
    """The engine that one rollout uses. Each of its turns is dispatched to one of the run's engines."""

    def on_turn(self, text: str, last: bool) -> None:
        """Called after each turn, before its tools run."""

    def leave(self) -> None:
        """Called when the rollout has ended, also after an error."""

    def interrupt(self) -> None:
        """End the requests of all rollouts of this step with the tokens generated so far (FinishReason.ABORTED)."""


@dataclass(slots=True)
class PendingTurn:
    """A turn that a rollout waits for. engine, sending: set once the policy has dispatched it."""

    prompt_ids: list[int]
    sampling: Sampling
    future: asyncio.Future[Completion]
    engine: int | None = None
    sending: asyncio.Task[None] | None = None


class BusyClock:
    """Measures how long engines have requests in flight, summed over engines."""

    def __init__(self) -> None:
        self._seconds, self._busy, self._since = 0.0, 0, time.monotonic()

    def seconds(self) -> float:
        """Return the seconds so far, summed over engines."""
        return self._seconds + self._busy * (time.monotonic() - self._since)

    def change(self, engines: int) -> None:
        """Add `engines` to the number of busy engines; negative: subtract."""
        self._seconds, self._since = self.seconds(), time.monotonic()
        self._busy += engines


class Dispatcher:
    """Sends turns to engines as a dispatch policy decides. An engine that fails a request gets no further ones."""

    def __init__(
        self,
        engines: Sequence[Engine],
        policy: DispatchPolicy,
        states: Sequence[EngineState],
        clock: BusyClock | None = None,
    ):
        self.engines, self.policy, self.states = engines, policy, states
        self.clock = clock or BusyClock()
        self.pending: dict[int, PendingTurn] = {}
        self.abandoned: set[int] = set()  # rollouts that ended while one of their turns was waiting in the policy
        self.last_error: EngineError | None = None
        self.dispatch_scheduled = self.interrupted = False

    def slot(self, index: int, problem_id: str, generated: int = 0) -> "DispatchedSlot":
        """Return the slot of a rollout. generated: tokens that the model generated in an earlier step."""
        return DispatchedSlot(self, index, problem_id, generated)

    def schedule_dispatch(self) -> None:
        """Ask the policy for dispatches once, after all events of this iteration of the event loop."""
        if not self.dispatch_scheduled:
            self.dispatch_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self.dispatch_scheduled = False
        if self.last_error and not any(state.alive for state in self.states):
            self._fail_pending(self.last_error)
            return
        for request, number in self.policy.dispatch(self.states):
            if request.rollout in self.abandoned:
                self.abandoned.discard(request.rollout)
                self.policy.finished(request, 0, True)
                self.schedule_dispatch()  # frees the rollout's place
                continue
            turn = self.pending[request.rollout]
            turn.engine = number
            turn.sending = asyncio.get_running_loop().create_task(self._send(request, number, turn))

    async def _send(self, request: TurnRequest, number: int, turn: PendingTurn) -> None:
        state, future = self.states[number], turn.future
        self.clock.change(int(not state.running))
        state.running += 1
        state.kv_used += len(turn.prompt_ids)
        try:
            completion = await self.engines[number].generate(turn.prompt_ids, turn.sampling)
            if not future.done():
                future.set_result(completion)
        except RequestRefused as error:
            if not future.done():
                future.set_exception(error)
        except EngineError as error:
            state.alive, self.last_error = False, error
            if future.done():
                return
            if any(other.alive for other in self.states):
                turn.engine = turn.sending = None
                self.policy.ready(request)
                self.schedule_dispatch()
            else:
                self._fail_pending(error)
        finally:
            state.running -= 1
            state.kv_used -= len(turn.prompt_ids)
            self.clock.change(-int(not state.running))

    def _fail_pending(self, error: EngineError) -> None:
        for turn in self.pending.values():
            if not turn.future.done():
                turn.future.set_exception(error)

    def interrupt(self) -> None:
        """End every turn with the tokens generated so far. Requests to engines that are not Interruptible are cancelled,
        and their turns have no tokens."""
        if self.interrupted:
            return
        self.interrupted = True
        interruptible = {i: engine for i, engine in enumerate(self.engines) if isinstance(engine, Interruptible)}
        for turn in self.pending.values():
            if turn.future.done() or turn.engine in interruptible:
                continue
            turn.future.set_result(Completion([], [], FinishReason.ABORTED))
            if turn.sending:
                turn.sending.cancel()
        for engine in interruptible.values():
            engine.interrupt()


class DispatchedSlot:
    """The slot of one rollout under a Dispatcher."""

    def __init__(self, dispatcher: Dispatcher, index: int, problem_id: str, generated: int):
        self.dispatcher, self.index, self.problem_id, self.generated = dispatcher, index, problem_id, generated
        self.turn = self.new_tokens = 0
        self.request: TurnRequest | None = None  # the turn that was reported to the policy

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        turn = PendingTurn(prompt_ids, sampling, asyncio.get_running_loop().create_future())
        self.request = TurnRequest(self.index, self.problem_id, self.turn, len(prompt_ids), self.generated)
        self.new_tokens = 0
        self.dispatcher.pending[self.index] = turn
        self.dispatcher.policy.ready(self.request)
        self.dispatcher.schedule_dispatch()
        try:
            completion = await turn.future
        finally:
            del self.dispatcher.pending[self.index]
            if turn.sending:
                turn.sending.cancel()  # has an effect only if this call was cancelled
            else:  # the policy may still dispatch the request
                self.dispatcher.abandoned.add(self.index)
                self.request = None
        if completion.finish_reason is not FinishReason.ABORTED:
            self.new_tokens = len(completion.token_ids)
        return completion

    def on_turn(self, text: str, last: bool) -> None:
        if self.request is None or not self.new_tokens:
            return  # `leave` reports a turn that was cut off
        self.dispatcher.policy.finished(self.request, self.new_tokens, last)
        self.generated += self.new_tokens
        self.turn += 1
        self.request = None
        self.dispatcher.schedule_dispatch()

    def leave(self) -> None:
        if self.request is not None:
            self.dispatcher.policy.finished(self.request, 0, True)
            self.dispatcher.schedule_dispatch()
            self.request = None

    def interrupt(self) -> None:
        self.dispatcher.interrupt()


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
    StopReason.UNFINISHED, to be passed again as `partial` of their tasks. branching: recipe key `rl.branching`.
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
