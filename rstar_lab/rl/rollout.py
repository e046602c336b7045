"""Many rollouts at once over some engines, in one of two ways.

Asynchronous: a scheduling policy says which turn goes where and when; tools run while others generate.
Lockstep: every live rollout asks for its next turn, then all are sent as one batch an engine, split in a fixed way. Slower,
but batches do not depend on timing: same machine, versions and seed give the same bits.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rstar_lab.rl.agent_loop import Codec, LoopLimits, rollout
from rstar_lab.rl.engine import Completion, Engine, EngineError, Sampling
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.scheduler import EngineState, Policy, TurnRequest
from rstar_lab.rl.tools import Tool
from rstar_lab.rl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """One rollout to be made. seed: of this rollout alone, so that its order among others does not matter."""

    problem: Problem
    traj_id: str
    group_id: str
    sample: int
    seed: int


class Seat(Engine, Protocol):
    """An engine as one rollout sees it."""

    def on_turn(self, text: str, last: bool) -> None: ...

    def leave(self) -> None:
        """The rollout has ended, in whatever way."""


class BatchEngine(Engine, Protocol):
    def submit(self, requests: Sequence[tuple[list[int], Sampling]]) -> list[asyncio.Future[Completion]]:
        """Several requests that enter the engine's batch together."""
        ...


class Lockstep:
    """Gathers the next request of every live rollout, then sends each engine its share at once, in the order of the seats.

    Rollouts of a group share an engine, and with it the cached prefix of their prompt.
    """

    def __init__(self, engines: Sequence[BatchEngine], groups: Sequence[str]):
        order = {group: i for i, group in enumerate(dict.fromkeys(groups))}
        self.engines = engines
        self.engine_of = [order[group] % len(engines) for group in groups]
        self.live = set(range(len(groups)))
        self.waiting: dict[int, tuple[list[int], Sampling, asyncio.Future[Completion]]] = {}

    def seat(self, index: int) -> "LockstepSeat":
        return LockstepSeat(self, index)

    def flush_if_complete(self) -> None:
        if self.waiting and len(self.waiting) == len(self.live):
            asyncio.get_running_loop().create_task(self._flush())

    async def _flush(self) -> None:
        batch, self.waiting = self.waiting, {}
        for number, engine in enumerate(self.engines):
            seats = [index for index in sorted(batch) if self.engine_of[index] == number]
            for index, future in zip(seats, engine.submit([batch[i][:2] for i in seats]) if seats else [], strict=True):
                _chain(future, batch[index][2])


class LockstepSeat:
    def __init__(self, lockstep: Lockstep, index: int):
        self.lockstep, self.index = lockstep, index

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.lockstep.waiting[self.index] = (prompt_ids, sampling, future)
        self.lockstep.flush_if_complete()
        return await future

    def on_turn(self, text: str, last: bool) -> None: ...

    def leave(self) -> None:
        self.lockstep.live.discard(self.index)
        self.lockstep.flush_if_complete()


def _chain(source: asyncio.Future[Completion], target: asyncio.Future[Completion]) -> None:
    def copy(done: asyncio.Future[Completion]) -> None:
        if target.done():
            return
        if error := done.exception():
            target.set_exception(error)
        else:
            target.set_result(done.result())

    source.add_done_callback(copy)


class Dispatcher:
    """Sends turns to engines as a policy says. An engine that fails a request for good is left out from then on."""

    def __init__(self, engines: Sequence[Engine], policy: Policy, states: Sequence[EngineState]):
        self.engines, self.policy, self.states = engines, policy, states
        self.waiting: dict[int, tuple[list[int], Sampling, asyncio.Future[Completion]]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.pumping = False

    def seat(self, index: int, problem_id: str) -> "DispatchedSeat":
        return DispatchedSeat(self, index, problem_id)

    def pump(self) -> None:
        """Ask the policy soon, once for all that happens in this turn of the event loop."""
        if not self.pumping:
            self.pumping = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self.pumping = False
        for request, number in self.policy.dispatch(self.states):
            task = asyncio.get_running_loop().create_task(self._send(request, number))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _send(self, request: TurnRequest, number: int) -> None:
        prompt_ids, sampling, future = self.waiting[request.rollout]
        state = self.states[number]
        state.running += 1
        state.kv_used += len(prompt_ids)
        try:
            completion = await self.engines[number].generate(prompt_ids, sampling)
            if not future.done():
                future.set_result(completion)
        except EngineError as error:
            state.alive = False
            if any(other.alive for other in self.states):
                self.policy.ready(request)
                self.pump()
            else:
                for _, _, other_future in self.waiting.values():
                    if not other_future.done():
                        other_future.set_exception(error)
        finally:
            state.running -= 1
            state.kv_used -= len(prompt_ids)


class DispatchedSeat:
    def __init__(self, dispatcher: Dispatcher, index: int, problem_id: str):
        self.dispatcher, self.index, self.problem_id = dispatcher, index, problem_id
        self.turn = self.generated = self.new = 0
        self.request: TurnRequest | None = None

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.request = TurnRequest(self.index, self.problem_id, self.turn, len(prompt_ids), self.generated)
        self.dispatcher.waiting[self.index] = (prompt_ids, sampling, future)
        self.dispatcher.policy.ready(self.request)
        self.dispatcher.pump()
        completion = await future
        del self.dispatcher.waiting[self.index]
        self.new = len(completion.token_ids)
        return completion

    def on_turn(self, text: str, last: bool) -> None:
        if self.request is None:
            return
        self.dispatcher.policy.finished(self.request, self.new, last)
        self.generated += self.new
        self.turn += 1
        self.request = None
        self.dispatcher.pump()

    def leave(self) -> None:
        self.dispatcher.waiting.pop(self.index, None)
        if self.request is not None:  # it ended in the middle of a turn
            self.dispatcher.policy.finished(self.request, 0, True)
            self.request = None
            self.dispatcher.pump()


async def roll_out(
    tasks: Sequence[RolloutTask],
    *,
    seats: Callable[[int, RolloutTask], Seat],
    codec: Codec,
    tools: Mapping[str, Tool],
    reward: Callable[[str, str], float],
    limits: LoopLimits,
    temperature: float = 1.0,
    top_p: float = 1.0,
    progress: Callable[[Trajectory], Any] | None = None,
) -> list[Trajectory]:
    """Make all rollouts and return them in the order of `tasks`; `progress` hears of each as it ends."""
    places = [seats(index, task) for index, task in enumerate(tasks)]

    async def one(task: RolloutTask, seat: Seat) -> Trajectory:
        try:
            trajectory = await rollout(
                task.problem,
                engine=seat,
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
                on_turn=seat.on_turn,
            )
        finally:
            seat.leave()
        if progress:
            progress(trajectory)
        return trajectory

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(task, seat)) for task, seat in zip(tasks, places, strict=True)]
    return [task.result() for task in running]
