"""Dispatch policies that `adaptive` is compared with."""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from rstar_lab.rl.scheduling.base import Dispatch, EngineState, TurnRequest, alive_engines


class Static:
    """Split the rollouts over the engines in equal contiguous shares. Send every turn at once."""

    def __init__(self) -> None:
        self._home: dict[int, int] = {}
        self._waiting: list[TurnRequest] = []

    def ready(self, request: TurnRequest) -> None:
        self._waiting.append(request)

    def finished(self, request: TurnRequest, generated: int, done: bool) -> None:
        if done:
            del self._home[request.rollout]

    def dispatch(self, engines: Sequence[EngineState]) -> Dispatch:
        waiting, self._waiting = self._waiting, []
        _split(waiting, self._home, engines)
        return [(request, self._home[request.rollout]) for request in waiting]


def _split(waiting: Sequence[TurnRequest], home: dict[int, int], engines: Sequence[EngineState]) -> None:
    """Assign the rollouts that have no live engine to live engines, in equal contiguous shares."""
    unassigned = [r for r in waiting if r.rollout not in home or not engines[home[r.rollout]].alive]
    if unassigned:
        alive = alive_engines(engines)
        for i, request in enumerate(unassigned):
            home[request.rollout] = alive[i * len(alive) // len(unassigned)]


class TurnBarrier:
    """Static split. The next turn of an engine's rollouts starts when all of them have finished the current turn."""

    def __init__(self) -> None:
        self._home: dict[int, int] = {}
        self._new: list[TurnRequest] = []
        self._held: dict[int, list[TurnRequest]] = {}
        self._out: dict[int, set[int]] = {}

    def ready(self, request: TurnRequest) -> None:
        self._new.append(request)

    def finished(self, request: TurnRequest, generated: int, done: bool) -> None:
        if done:
            self._out[self._home.pop(request.rollout)].discard(request.rollout)

    def dispatch(self, engines: Sequence[EngineState]) -> Dispatch:
        for engine in [e for e in self._held if not engines[e].alive]:
            self._new += self._held.pop(engine)
        for request in self._new:
            if request.rollout in self._home:
                self._out[self._home[request.rollout]].discard(request.rollout)
        _split(self._new, self._home, engines)
        for request in self._new:
            self._held.setdefault(self._home[request.rollout], []).append(request)
        self._new = []
        sent: Dispatch = []
        for engine in [e for e in self._held if not self._out.get(e)]:
            requests = self._held.pop(engine)
            self._out[engine] = {request.rollout for request in requests}
            sent += [(request, engine) for request in requests]
        return sent


class LeastInFlight:
    """Send a rollout's first turn at once to the engine with the fewest requests in flight; later turns follow it (as in verl)."""

    def __init__(self) -> None:
        self._home: dict[int, int] = {}
        self._in_flight: dict[int, int] = {}
        self._waiting: list[TurnRequest] = []

    def ready(self, request: TurnRequest) -> None:
        self._waiting.append(request)

    def finished(self, request: TurnRequest, generated: int, done: bool) -> None:
        self._in_flight[self._home[request.rollout]] -= 1
        if done:
            del self._home[request.rollout]

    def dispatch(self, engines: Sequence[EngineState]) -> Dispatch:
        sent: Dispatch = []
        for request in self._waiting:
            engine = self._home.get(request.rollout)
            if engine is None or not engines[engine].alive:
                engine = min(alive_engines(engines), key=lambda i: self._in_flight.get(i, 0))
                self._home[request.rollout] = engine
            self._in_flight[engine] = self._in_flight.get(engine, 0) + 1
            sent.append((request, engine))
        self._waiting = []
        return sent


class KvCapacity:
    """Admit as many rollouts to an engine as its KV cache holds at the maximum length (rStar2-Agent, section on infrastructure).

    max_tokens: prompt plus response of the longest rollout, in tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._home: dict[int, int] = {}
        self._rollouts: dict[int, int] = {}
        self._queue: deque[TurnRequest] = deque()
        self._next_turns: list[TurnRequest] = []
        self._changed = False  # whether a rollout arrived or ended since the last admission

    def ready(self, request: TurnRequest) -> None:
        if request.rollout in self._home:
            self._next_turns.append(request)
        else:
            self._queue.append(request)
            self._changed = True

    def finished(self, request: TurnRequest, generated: int, done: bool) -> None:
        if done:
            self._rollouts[self._home.pop(request.rollout)] -= 1
            self._changed = True

    def dispatch(self, engines: Sequence[EngineState]) -> Dispatch:
        sent: Dispatch = []
        for request in self._next_turns:
            engine = self._home[request.rollout]
            if engines[engine].alive:
                sent.append((request, engine))
            else:
                self._rollouts[self._home.pop(request.rollout)] -= 1
                self._queue.appendleft(request)
                self._changed = True
        self._next_turns = []
        if self._queue and self._changed:
            self._changed = False
            sent += self._admit(engines)
        return sent

    def _admit(self, engines: Sequence[EngineState]) -> Dispatch:
        """Send each first turn to the engine with the most free places."""
        sent: Dispatch = []
        slots = {i: max(engines[i].kv_tokens // self.max_tokens, 1) for i in alive_engines(engines)}
        room = [(self._rollouts.get(i, 0) - count, i) for i, count in slots.items() if self._rollouts.get(i, 0) < count]
        room.sort()
        while self._queue and room:
            taken, engine = heappop(room)
            request = self._queue.popleft()
            self._home[request.rollout] = engine
            self._rollouts[engine] = self._rollouts.get(engine, 0) + 1
            sent.append((request, engine))
            if taken + 1 < 0:
                heappush(room, (taken + 1, engine))
        return sent
