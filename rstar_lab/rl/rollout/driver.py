"""Many rollouts at once over some engines, in one of two ways.

Asynchronous: a scheduling policy says which turn goes where and when; tools run while others generate.
Lockstep: rollouts have fixed engines; once every live one of an engine has asked for its next turn, they are sent as one
batch. Slower, but batches do not depend on timing: same machine, versions and seed give the same bits.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rstar_lab.errors import UserError
from rstar_lab.rl.engine import Completion, Engine, EngineError, FinishReason, Interruptible, RequestRefused, Sampling
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.rollout.agent_loop import Codec, RolloutLimits, run_rollout
from rstar_lab.rl.scheduling.policies import EngineState, Policy, TurnRequest
from rstar_lab.rl.tools.base import Tool
from rstar_lab.rl.trajectory import StopReason, Trajectory


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """One rollout to be made. seed: of this rollout alone, so that its order among others does not matter.

    partial: what an earlier step has made of it; one that has ended waits there for its group.
    """

    problem: Problem
    traj_id: str
    group_id: str
    sample: int
    seed: int
    partial: Trajectory | None = None


class EngineSlot(Engine, Protocol):
    """An engine as one rollout sees it."""

    def on_turn(self, text: str, last: bool) -> None: ...

    def leave(self) -> None:
        """The rollout has ended, in whatever way."""

    def interrupt(self) -> None:
        """The step is over: what this slot, or any beside it, waits for comes back as it is (FinishReason.ABORTED)."""


@dataclass(slots=True)
class Waiting:
    """A turn that a rollout waits for. engine, sending: where it is and the request to it, once the policy has said where."""

    prompt_ids: list[int]
    sampling: Sampling
    future: asyncio.Future[Completion]
    engine: int | None = None
    sending: asyncio.Task[None] | None = None


class Dispatcher:
    """Sends turns to engines as a policy says. An engine that fails a request for good is left out from then on."""

    def __init__(self, engines: Sequence[Engine], policy: Policy, states: Sequence[EngineState]):
        self.engines, self.policy, self.states = engines, policy, states
        self.waiting: dict[int, Waiting] = {}
        self.given_up: set[int] = set()  # rollouts that ended while the policy held a turn of theirs back
        self.pumping = self.interrupted = False

    def slot(self, index: int, problem_id: str, generated: int = 0) -> "DispatchedSlot":
        """generated: tokens that the model has written in an earlier step."""
        return DispatchedSlot(self, index, problem_id, generated)

    def pump(self) -> None:
        """Ask the policy soon, once for all that happens in this turn of the event loop."""
        if not self.pumping:
            self.pumping = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self.pumping = False
        for request, number in self.policy.dispatch(self.states):
            if request.rollout in self.given_up:
                self.given_up.discard(request.rollout)
                self.policy.finished(request, 0, True)
                self.pump()  # what it would have held is free
                continue
            waiting = self.waiting[request.rollout]
            waiting.engine = number
            waiting.sending = asyncio.get_running_loop().create_task(self._send(request, number, waiting))

    async def _send(self, request: TurnRequest, number: int, waiting: Waiting) -> None:
        state, future = self.states[number], waiting.future
        state.running += 1
        state.kv_used += len(waiting.prompt_ids)
        try:
            completion = await self.engines[number].generate(waiting.prompt_ids, waiting.sampling)
            if not future.done():
                future.set_result(completion)
        except RequestRefused as error:
            if not future.done():
                future.set_exception(error)
        except EngineError as error:
            state.alive = False
            if future.done():
                return
            if any(other.alive for other in self.states):
                waiting.engine = waiting.sending = None
                self.policy.ready(request)
                self.pump()
            else:
                for other_waiting in self.waiting.values():
                    if not other_waiting.future.done():
                        other_waiting.future.set_exception(error)
        finally:
            state.running -= 1
            state.kv_used -= len(waiting.prompt_ids)

    def interrupt(self) -> None:
        """End every turn under way with the tokens that it has. Engines that cannot tell are cancelled: their turns have none."""
        if self.interrupted:
            return
        self.interrupted = True
        able = {i: engine for i, engine in enumerate(self.engines) if isinstance(engine, Interruptible)}
        for waiting in self.waiting.values():
            if waiting.future.done() or waiting.engine in able:
                continue
            waiting.future.set_result(Completion([], [], FinishReason.ABORTED))
            if waiting.sending:
                waiting.sending.cancel()
        for engine in able.values():
            engine.interrupt()


class DispatchedSlot:
    def __init__(self, dispatcher: Dispatcher, index: int, problem_id: str, generated: int):
        self.dispatcher, self.index, self.problem_id, self.generated = dispatcher, index, problem_id, generated
        self.turn = self.new = 0
        self.request: TurnRequest | None = None  # of a turn that the policy has given to an engine, or may

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        waiting = Waiting(prompt_ids, sampling, asyncio.get_running_loop().create_future())
        self.request = TurnRequest(self.index, self.problem_id, self.turn, len(prompt_ids), self.generated)
        self.new = 0
        self.dispatcher.waiting[self.index] = waiting
        self.dispatcher.policy.ready(self.request)
        self.dispatcher.pump()
        try:
            completion = await waiting.future
        finally:
            del self.dispatcher.waiting[self.index]
            if waiting.sending:
                waiting.sending.cancel()  # where this call was cancelled; else it has ended
            else:  # the policy may hand the request out before the rollout leaves
                self.dispatcher.given_up.add(self.index)
                self.request = None
        if completion.finish_reason is not FinishReason.ABORTED:
            self.new = len(completion.token_ids)
        return completion

    def on_turn(self, text: str, last: bool) -> None:
        if self.request is None or not self.new:
            return  # `leave` ends a turn that was cut
        self.dispatcher.policy.finished(self.request, self.new, last)
        self.generated += self.new
        self.turn += 1
        self.request = None
        self.dispatcher.pump()

    def leave(self) -> None:
        if self.request is not None:
            self.dispatcher.policy.finished(self.request, 0, True)
            self.dispatcher.pump()
            self.request = None

    def interrupt(self) -> None:
        self.dispatcher.interrupt()


async def run_rollouts(
    tasks: Sequence[RolloutTask],
    *,
    slots: Callable[[int, RolloutTask], EngineSlot],
    codec: Codec,
    tools: Mapping[str, Tool],
    reward: Callable[[str, str], float],
    limits: RolloutLimits,
    temperature: float = 1.0,
    top_p: float = 1.0,
    step_ended: asyncio.Event | None = None,
    carry_over: bool = False,
    progress: Callable[[Trajectory], Any] | None = None,
) -> list[Trajectory]:
    """Make all rollouts and return them in the order of `tasks`; `progress` hears of each as it ends.

    step_ended: once set, what has not ended is cut; with carry_over it comes back as StopReason.UNFINISHED, to be handed in
    again as its task's `partial`. Raises UserError where the user's reward does.
    """
    places = [slots(index, task) for index, task in enumerate(tasks)]

    async def interrupt(step_ended: asyncio.Event) -> None:
        await step_ended.wait()
        for slot in places:
            slot.interrupt()

    async def one(task: RolloutTask, slot: EngineSlot) -> Trajectory:
        if task.partial and task.partial.stop_reason is not StopReason.UNFINISHED:
            return task.partial
        try:
            trajectory = await run_rollout(
                task.problem,
                engine=slot,
                codec=codec,
                tools=tools,
                reward=reward,
                limits=limits,
                traj_id=task.traj_id,
                group_id=task.group_id,
                sample=task.sample,
                seed=task.seed,
                temperature=temperature,
                top_p=top_p,
                on_turn=slot.on_turn,
                step_ended=step_ended,
                carry_over=carry_over,
                partial=task.partial,
            )
        finally:
            slot.leave()
        if progress:
            progress(trajectory)
        return trajectory

    watch = asyncio.create_task(interrupt(step_ended)) if step_ended else None
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(task, slot)) for task, slot in zip(tasks, places, strict=True)]
    except* UserError as errors:
        raise _first(errors) from None
    finally:
        if watch:
            watch.cancel()
    return [task.result() for task in running]


def _first(errors: BaseExceptionGroup) -> BaseException:
    """One of the errors in a group, however deep."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
