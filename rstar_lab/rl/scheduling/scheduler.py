"""The scheduler: admits the turns of all rollouts and places them on engines or inference servers.

`Scheduler` has no transport: run it in the event loop of the process that drives the rollouts (`slots`), or wrap it in an asyncio
Ray actor (with `max_concurrency` of at least the number of concurrent rollouts: each waits in `admit`). All
methods must run in one event loop. How to drive it:

    scheduler = Scheduler("adaptive", max_tokens=16_384)
    for name, kv_tokens in servers: scheduler.add_server(name, kv_tokens, max_running=256)
    scheduler.begin_step(rollouts=16_384)                        # once a step, before its first turn

    # in each rollout, for each turn
    while True:
        server = await scheduler.admit(rollout_id, problem_id, len(prompt_ids))
        try:
            completion = await clients[server].generate(prompt_ids, sampling)
            break
        except EngineError:
            scheduler.server_failed(server)                      # the next `admit` chooses another server
    scheduler.finish(rollout_id, len(completion.token_ids), done=last_turn)

    # when a rollout ends without a last turn (error, time limit): scheduler.abandon(rollout_id)
    # in the background: await poll_metrics(scheduler, {name: read_metrics, ...})

`read_metrics` is any coroutine function that returns a `ServerReport`. A server that fails three reads in a row is marked as
failed; a server that answers again is used again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from rstar_lab.rl.engine import EngineError
from rstar_lab.rl.scheduling.base import DispatchPolicy, EngineState, TurnRequest
from rstar_lab.rl.scheduling.lengths import LengthPredictor
from rstar_lab.rl.scheduling.policies import make_policy


@dataclass(frozen=True, slots=True)
class ServerReport:
    """Live metrics of a server.

    preemptions, prompt_tokens, generated_tokens: counts since the server started. kv_tokens: size of the KV cache in tokens; 0 if
    the server does not report it.
    """

    preemptions: int
    kv_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    @property
    def progress(self) -> tuple[int, int]:
        """Counters that increase while the server processes requests."""
        return self.prompt_tokens, self.generated_tokens


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


@dataclass(slots=True)
class _Server:
    """A server. share: share of its KV cache that the policy may use; lowered while the server preempts."""

    state: EngineState
    kv_tokens: int
    share: float = 1.0
    preemptions: int = 0
    in_flight: int = 0


@dataclass(slots=True)
class _Rollout:
    """A rollout that has been admitted or waits for admission.

    generated: tokens generated in earlier turns. request: its current turn. server: index of the server on which the
    turn is in flight. future: result of the call of `admit` that waits.
    """

    number: int
    problem: str
    generated: int = 0
    turn: int = 0
    request: TurnRequest | None = None
    server: int | None = None
    future: "asyncio.Future[str] | None" = None


class Scheduler:
    """Admits turns to servers by a dispatch policy. See the module docstring for how to drive it.

    Args:
        policy: Name of a dispatch policy, or a function that makes one.
        max_tokens: Prompt plus response of the longest rollout.
        max_response_tokens: Longest response. Default: `max_tokens`.
        predictor: Predicts lengths from earlier rollouts. Default: a new one.
        patience_s: How long `admit` waits for a server to return when all have failed.
        clock: Counts the time during which servers have turns in flight.
    """

    # A preemption costs a prefill of the whole context, so the share falls faster than it rises.
    SHARE_STEP_DOWN, SHARE_STEP_UP, SHARE_MIN = 0.9, 0.01, 0.5
    HOLD_S = 1.0  # how long the first dispatch of a step waits for the other rollouts of the step

    def __init__(
        self,
        policy: str | Callable[[], DispatchPolicy] = "adaptive",
        *,
        max_tokens: int,
        max_response_tokens: int | None = None,
        predictor: LengthPredictor | None = None,
        patience_s: float = 300.0,
        clock: BusyClock | None = None,
    ):
        self.policy, self.max_tokens = policy, max_tokens
        self.patience_s = patience_s
        self.predictor = predictor or LengthPredictor(max_response_tokens or max_tokens)
        self.clock = clock or BusyClock()
        self._policy: DispatchPolicy = self._new_policy()
        self._servers: list[_Server] = []
        self._states: list[EngineState] = []
        self._index: dict[str, int] = {}
        self._rollouts: dict[str, _Rollout] = {}
        self._names: dict[int, str] = {}
        self._abandoned: set[int] = set()  # numbers of rollouts that ended while a turn of them waited in the policy
        self._next_number = 0
        self._expected = 0  # number of first turns that the first dispatch of the step still waits for
        self._hold: asyncio.TimerHandle | None = None
        self._give_up: asyncio.TimerHandle | None = None
        self._gave_up = False  # all servers have failed for `patience_s`
        self._last_error: EngineError | None = None
        self._scheduled = False
        self._decisions, self._decision_s = 0, 0.0

    def _new_policy(self) -> DispatchPolicy:
        if callable(self.policy):
            return self.policy()
        return make_policy(self.policy, max_context=self.max_tokens, predictor=self.predictor)

    # Servers

    def add_server(self, name: str, kv_tokens: int, max_running: int = 256) -> None:
        """Add a server. kv_tokens: size of its KV cache. Raises ValueError if rollouts are open or the name is taken."""
        if self._rollouts or name in self._index:
            raise ValueError(f"server {name}: already added, or added while rollouts are open")
        state = EngineState(name, kv_tokens, max_running)
        self._index[name] = len(self._servers)
        self._servers.append(_Server(state, kv_tokens))
        self._states.append(state)
        self._policy = self._new_policy()  # policies size their tables at the first dispatch

    def server_failed(self, name: str, error: EngineError | None = None) -> None:
        """Stop placing turns on a server. Turns that were in flight on it are placed again when `admit` is called for them.

        error: raised by `admit` if no other server is left.
        """
        self._servers[self._index[name]].state.alive = False
        self._last_error = error or self._last_error
        if not any(state.alive for state in self._states) and self._give_up is None:
            self._give_up = asyncio.get_running_loop().call_later(self.patience_s, self._fail_waiting)
        self._dispatch_soon()

    def server_restarted(self, name: str) -> None:
        """Place turns on a server again."""
        server = self._servers[self._index[name]]
        server.state.alive, server.preemptions = True, 0
        self._gave_up, self._last_error = False, None
        if self._give_up:
            self._give_up.cancel()
            self._give_up = None
        self._dispatch_soon()

    def is_alive(self, name: str) -> bool:
        return self._servers[self._index[name]].state.alive

    def report(self, name: str, report: ServerReport) -> None:
        """Record the live metrics of a server. A server that preempts gets fewer rollouts until preemption stops."""
        server = self._servers[self._index[name]]
        if report.preemptions > server.preemptions:
            server.share = max(server.share * self.SHARE_STEP_DOWN, self.SHARE_MIN)
        elif server.share < 1.0:
            server.share = min(server.share + self.SHARE_STEP_UP, 1.0)
        server.preemptions = report.preemptions
        server.kv_tokens = report.kv_tokens or server.kv_tokens
        before, server.state.kv_tokens = server.state.kv_tokens, int(server.share * server.kv_tokens)
        if server.state.kv_tokens > before:
            self._dispatch_soon()

    # Rollouts

    def begin_step(self, rollouts: int) -> None:
        """Start a step: its first dispatch waits for the first turns of `rollouts` rollouts, at most `HOLD_S`."""
        if not self._rollouts:
            self.predictor.new_step()
            self._policy = self._new_policy()
            self._abandoned.clear()
        self._expected = rollouts
        self._stop_hold()

    async def admit(self, rollout: str, problem: str, tokens: int, *, generated: int = 0) -> str:
        """Wait until the next turn of a rollout may run; return the name of its server.

        tokens: length of the turn's prompt. generated: tokens that the rollout generated in an earlier step. Call it
        again for the same turn if the server failed. If the caller is cancelled while it waits, the rollout is
        abandoned. Raises EngineError if no server was alive for `patience_s`, or if there are no servers.
        """
        if not self._servers:
            raise EngineError("the scheduler has no servers: call add_server first")
        entry = self._rollouts.get(rollout)
        if entry is None:
            entry = self._rollouts[rollout] = _Rollout(self._next_number, problem, generated)
            self._names[entry.number] = rollout
            self._next_number += 1
            self._expected = max(self._expected - 1, 0)
        elif entry.future is not None:
            raise ValueError(f"rollout {rollout}: admit was called while an earlier admit waits")
        self._release(entry)  # if the server of this turn failed
        entry.request = TurnRequest(entry.number, entry.problem, entry.turn, tokens, entry.generated)
        entry.future = asyncio.get_running_loop().create_future()
        self._policy.ready(entry.request)
        self._dispatch_soon()
        admitted = None
        try:
            admitted = await entry.future
            return admitted
        finally:
            if admitted is None:
                self.abandon(rollout)
            entry.future = None

    def finish(self, rollout: str, tokens: int, *, done: bool) -> None:
        """Report that the turn in flight returned `tokens` tokens. done: the rollout has ended."""
        entry = self._rollouts[rollout]
        if entry.server is None or entry.request is None:
            raise ValueError(f"rollout {rollout}: finish was called without an admitted turn")
        self._release(entry)
        self._policy.finished(entry.request, tokens, done)
        entry.request = None
        entry.generated += tokens
        entry.turn += 1
        if done:
            self._forget(rollout)
        self._dispatch_soon()

    def abandon(self, rollout: str) -> None:
        """End a rollout without a last turn. Does nothing if it has ended."""
        entry = self._rollouts.get(rollout)
        if entry is None:
            return
        in_flight = entry.server is not None
        self._release(entry)
        if entry.request is not None and not in_flight:
            self._abandoned.add(entry.number)  # the turn waits in the policy, which cannot drop it
        else:
            request = entry.request or TurnRequest(entry.number, entry.problem, entry.turn, 0, entry.generated)
            self._policy.finished(request, 0, True)
        if entry.future and not entry.future.done():
            entry.future.cancel()
        self._forget(rollout)
        self._dispatch_soon()

    def stats(self) -> dict[str, float | dict[str, int]]:
        """Return the numbers of open rollouts, of turns in flight by server, of live servers and of decisions, and the ms of a decision."""
        return {
            "open": len(self._rollouts),
            "in_flight": {server.state.name: server.in_flight for server in self._servers},
            "alive": sum(state.alive for state in self._states),
            "decisions": self._decisions,
            "decision_ms": 1000 * self._decision_s / max(self._decisions, 1),
        }

    def _release(self, entry: _Rollout) -> None:
        """Record that the turn of a rollout, if it has one in flight, has left its server."""
        if entry.server is not None:
            server = self._servers[entry.server]
            server.in_flight -= 1
            self.clock.change(-int(not server.in_flight))
            entry.server = None

    def _forget(self, rollout: str) -> None:
        del self._names[self._rollouts.pop(rollout).number]

    # Dispatch

    def _dispatch_soon(self) -> None:
        """Dispatch once, after all events of this iteration of the event loop."""
        loop = asyncio.get_running_loop()
        if self._expected > 0:
            if self._hold is None:
                self._hold = loop.call_later(self.HOLD_S, self._end_hold)
            return
        self._stop_hold()
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._dispatch)

    def _stop_hold(self) -> None:
        if self._hold:
            self._hold.cancel()
            self._hold = None

    def _end_hold(self) -> None:
        self._expected = 0
        self._hold = None
        self._dispatch_soon()

    def _dispatch(self) -> None:
        self._scheduled = False
        if not any(state.alive for state in self._states):
            if self._gave_up:
                self._fail_waiting()
            return
        start = time.perf_counter()
        for request, number in self._policy.dispatch(self._states):
            self._decisions += 1
            if request.rollout in self._abandoned:
                self._abandoned.discard(request.rollout)
                self._policy.finished(request, 0, True)
                self._dispatch_soon()
                continue
            entry = self._rollouts[self._names[request.rollout]]
            entry.server = number
            server = self._servers[number]
            self.clock.change(int(not server.in_flight))
            server.in_flight += 1
            if entry.future and not entry.future.done():
                entry.future.set_result(server.state.name)
        self._decision_s += time.perf_counter() - start

    def _fail_waiting(self) -> None:
        self._give_up, self._gave_up = None, True
        message = f"no inference server has answered for {self.patience_s:.0f} s; see the servers' logs"
        for entry in self._rollouts.values():
            if entry.future and not entry.future.done():
                entry.future.set_exception(self._last_error or EngineError(message))


async def poll_metrics(
    scheduler: Scheduler, sources: Mapping[str, Callable[[], Awaitable[ServerReport]]], *, every_s: float = 1.0
) -> None:
    """Read the metrics of all servers every `every_s` seconds and report them, until cancelled.

    A server whose reads fail three times in a row is marked as failed. A failed server whose read succeeds is used
    again; `sources` must fail while a server does not have the current weights.
    """

    async def poll(name: str, read: Callable[[], Awaitable[ServerReport]]) -> None:
        failures = 0
        while True:
            report = None
            with suppress(Exception):  # any error of a source means that its server cannot be used
                async with asyncio.timeout(max(every_s, 10.0)):  # wait_for of Python 3.11 can lose a cancellation
                    report = await read()
            if report is not None:
                failures = 0
                if not scheduler.is_alive(name):
                    scheduler.server_restarted(name)
                scheduler.report(name, report)
            elif (failures := failures + 1) >= 3 and scheduler.is_alive(name):
                scheduler.server_failed(name)
            await asyncio.sleep(every_s)

    async with asyncio.TaskGroup() as group:
        for name, read in sources.items():
            group.create_task(poll(name, read))
