"""Which waiting rollout goes to which engine, and when: one small policy object each, the same in real runs and in the simulator.

A policy is plain bookkeeping: no clock, no asyncio, no network. Whoever drives it (the rollout driver, the simulator) tells it
what happened (`ready`, `finished`) and after each event asks `dispatch` what to send now:

    policy.ready(request)                       a turn may be generated: the first of a rollout, or its tools have answered
    policy.finished(request, generated, done)   an engine returned it with so many tokens; done: the rollout ends here
    for request, engine in policy.dispatch(engines): ...

A turn whose engine died is handed to `ready` once more, with `alive` false for that engine, and goes elsewhere. A rollout that
is given up ends with `finished(request, 0, done=True)`. The first `ready` of all rollouts of a step should come before the first
`dispatch`, so that a split over the engines is an even one.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Protocol

import numpy as np

from rstar_lab.rl.scheduling.lengths import LengthPredictor


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn to be generated.

    rollout: a number unique in the step. tokens: prompt ids the engine will read (everything so far, tool answers included).
    generated: tokens the model has written in earlier turns.
    """

    rollout: int
    problem: str
    turn: int
    tokens: int
    generated: int


@dataclass(slots=True)
class EngineState:
    """What the driver knows of an engine: its KV cache in tokens, vLLM's max_num_seqs, and what it last reported."""

    name: str
    kv_tokens: int
    max_running: int = 1024
    kv_used: float = 0.0
    running: int = 0
    waiting: int = 0
    alive: bool = True


Dispatch = list[tuple[TurnRequest, int]]


class Policy(Protocol):
    """See the head of this file. Engines are indices into the sequence given to `dispatch`, the same in every call."""

    def ready(self, request: TurnRequest) -> None: ...

    def finished(self, request: TurnRequest, generated: int, done: bool) -> None: ...

    def dispatch(self, engines: Sequence[EngineState]) -> Dispatch: ...


def _alive(engines: Sequence[EngineState]) -> list[int]:
    return [i for i, engine in enumerate(engines) if engine.alive]


class Static:
    """Rollouts are split over the engines in their order, in equal shares; every turn is sent at once."""

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
    """Give the rollouts that have no living engine one, in equal contiguous shares."""
    homeless = [r for r in waiting if r.rollout not in home or not engines[home[r.rollout]].alive]
    if homeless:
        alive = _alive(engines)
        for i, request in enumerate(homeless):
            home[request.rollout] = alive[i * len(alive) // len(homeless)]


class TurnBarrier:
    """The static split, and the next turn of an engine's rollouts waits for the slowest tool of this one."""

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
    """A rollout's first turn goes at once to the engine with the fewest requests in flight, the others follow it (verl's)."""

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
                engine = min(_alive(engines), key=lambda i: self._in_flight.get(i, 0))
                self._home[request.rollout] = engine
            self._in_flight[engine] = self._in_flight.get(engine, 0) + 1
            sent.append((request, engine))
        self._waiting = []
        return sent


class KvCapacity:
    """The paper's: an engine has as many rollouts as its KV cache holds at the maximum length; a rollout that ends makes room.

    max_tokens: prompt and response of the longest rollout, in tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._home: dict[int, int] = {}
        self._rollouts: dict[int, int] = {}
        self._queue: deque[TurnRequest] = deque()
        self._next_turns: list[TurnRequest] = []
        self._changed = False  # whether a rollout came or went since the queue was last looked at

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
        """First turns, each to the engine with the most room."""
        sent: Dispatch = []
        slots = {i: max(engines[i].kv_tokens // self.max_tokens, 1) for i in _alive(engines)}
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


class Adaptive:
    """Ours: as many rollouts on an engine as its KV cache is expected to hold, the longest expected first, work kept even.

    - Admission: the context of an engine's rollouts is projected forward with their expected remaining tokens; a new rollout
      is sent where the highest point of the projection stays below `fill` of the KV cache. Rollouts that wait for a tool count,
      so that their prefix stays cached. An expected length stands for three equally likely ones (`SPREAD`).
      fill None: `FILL`, the first where the longest rollout takes more steps than all the work at a full cache. There it alone
      decides, and must not be preempted; else the throughput of full caches does.
    - Order: `probes` rollouts of each problem first, which teach the predictor; then the problems expected to be longest.
    - Balance: work is token-steps of context (what decoding reads and what the cache holds). A new rollout goes to the engine
      with the least; a later turn stays with its engine and its cached prefix, unless that engine has more work than another
      by `margin` times what the longest possible rollout is worth.
    """

    SPREAD = np.array([0.5, 0.9, 1.6])  # thirds of a lognormal with sigma 0.6, over its mean
    FILL = (0.8, 0.9)
    TOKEN_WORK = 400  # a token's own arithmetic, in tokens of context read

    def __init__(
        self, predictor: LengthPredictor, *, fill: float | None = None, probes: int = 2, margin: float = 1.5
    ) -> None:
        self.predictor = predictor
        self._fill, self.probes = fill, probes
        self._margin = margin * self._work(0.0, predictor.max_tokens)
        self._home: dict[int, int] = {}
        self._next_turns: list[TurnRequest] = []
        self._resumed: deque[TurnRequest] = deque()
        self._new: dict[str, deque[TurnRequest]] = {}
        self._started: dict[str, int] = {}
        self._queue: list[tuple[int, float, str]] = []  # heap of problems; entries may be old or double
        self._ledgers: list[_Ledger] = []
        self._work_left: list[float] = []
        self._open: set[int] = (
            set()
        )  # engines that may have room; the others are full until one of their rollouts moves on

    def ready(self, request: TurnRequest) -> None:
        if request.rollout in self._home:
            self._next_turns.append(request)
        elif request.generated:
            self._resumed.append(request)
        else:
            waiting = self._new.setdefault(request.problem, deque())
            if not waiting:
                heappush(self._queue, self._rank(request.problem))
            waiting.append(request)

    def finished(self, request: TurnRequest, generated: int, done: bool) -> None:
        engine = self._home[request.rollout]
        self._leave(request.rollout, engine)
        self._open.add(engine)
        total = request.generated + generated
        if not done:
            self.predictor.progress(request.problem, total, request.rollout)
            left = self.predictor.remaining(request.problem, total)
            self._join(request.rollout, engine, request.tokens + generated, left)
            return
        del self._home[request.rollout]
        if generated:
            self.predictor.observe(request.problem, total, request.rollout)
            if self._new.get(request.problem):
                heappush(self._queue, self._rank(request.problem))

    def dispatch(self, engines: Sequence[EngineState]) -> Dispatch:
        if not self._ledgers:
            self._ledgers = [_Ledger() for _ in engines]
            self._work_left = [0.0] * len(engines)
            self._open = set(range(len(engines)))
            if self._fill is None:
                self._fill = self.FILL[self._steps_at_full_caches(engines) > self.predictor.max_tokens]
        # One that has come back holds nothing, so nothing that moves on would open it.
        self._open.update(i for i in _alive(engines) if not self._ledgers[i].rollouts)
        sent: Dispatch = []
        for request in self._next_turns:
            self._continue(request, engines, sent)
        self._next_turns = []
        while self._resumed and self._admit(self._resumed[0], engines, sent):
            self._resumed.popleft()
        while self._queue and self._open and not self._resumed:
            problem = self._queue[0][2]
            waiting = self._new[problem]
            if not waiting:
                heappop(self._queue)
            elif (rank := self._rank(problem)) != self._queue[0]:
                heapreplace(self._queue, rank)
            elif self._admit(waiting[0], engines, sent):
                waiting.popleft()
                self._started[problem] = self._started.get(problem, 0) + 1
            else:
                break
        return sent

    def _steps_at_full_caches(self, engines: Sequence[EngineState]) -> float:
        """Decode steps that the waiting rollouts are expected to take with every KV cache full."""
        occupied = 0.0  # token-steps
        for problem, waiting in self._new.items():
            left = self.predictor.remaining(problem)
            occupied += sum(left * (request.tokens + left / 2) for request in waiting)
        return occupied / sum(engines[i].kv_tokens for i in _alive(engines))

    def _rank(self, problem: str) -> tuple[int, float, str]:
        probed = min(self._started.get(problem, 0), self.probes)
        return probed, -self.predictor.remaining(problem), problem

    def _continue(self, request: TurnRequest, engines: Sequence[EngineState], sent: Dispatch) -> None:
        """Send a later turn: home, or where there is much less work."""
        home = self._home[request.rollout]
        self._leave(request.rollout, home)
        if not engines[home].alive:
            del self._home[request.rollout]
            self._resumed.append(request)
            return
        left = self.predictor.remaining(request.problem, request.generated)
        work = self._work_left
        least = min(work)
        engine = home
        if work[home] - least > self._margin:
            other = work.index(least)
            if engines[other].alive and self._fits(other, engines[other], request.tokens, left):
                engine = other
        self._send(request, engine, left, sent)

    def _admit(self, request: TurnRequest, engines: Sequence[EngineState], sent: Dispatch) -> bool:
        """Send a rollout's first turn here to the engine with the least work that has room; false where none has."""
        left = self.predictor.remaining(request.problem, request.generated)
        while self._open:
            engine = min(self._open, key=self._work_left.__getitem__)
            if engines[engine].alive and self._fits(engine, engines[engine], request.tokens, left):
                self._send(request, engine, left, sent)
                return True
            self._open.remove(engine)
        return False

    def _send(self, request: TurnRequest, engine: int, left: float, sent: Dispatch) -> None:
        self._home[request.rollout] = engine
        self._join(request.rollout, engine, request.tokens, left)
        sent.append((request, engine))

    def _fits(self, engine: int, state: EngineState, tokens: float, left: float) -> bool:
        """Whether the projected context stays below the limit with one more rollout; an empty engine takes any."""
        ledger = self._ledgers[engine]
        assert self._fill is not None
        limit = self._fill * state.kv_tokens
        rollouts = ledger.rollouts
        if not rollouts:
            return True
        if len(rollouts) >= state.max_running:
            return False
        if ledger.tokens + tokens + self.SPREAD[-1] * (ledger.left + left) < limit:
            return True
        pairs = np.array([*rollouts.values(), (tokens, left)])
        ends = np.outer(pairs[:, 1], self.SPREAD).ravel()
        order = ends.argsort()[::-1]
        held = np.repeat(pairs[:, 0], len(self.SPREAD))[order].cumsum()
        grown = ends[order] * np.arange(1, len(order) + 1)
        return float((held + grown).max()) < limit * len(self.SPREAD)

    @classmethod
    def _work(cls, tokens: float, left: float) -> float:
        return left * (tokens + left / 2 + cls.TOKEN_WORK)

    def _join(self, rollout: int, engine: int, tokens: float, left: float) -> None:
        ledger = self._ledgers[engine]
        ledger.rollouts[rollout] = (tokens, left)
        ledger.tokens += tokens
        ledger.left += left
        self._work_left[engine] += self._work(tokens, left)

    def _leave(self, rollout: int, engine: int) -> None:
        ledger = self._ledgers[engine]
        tokens, left = ledger.rollouts.pop(rollout)
        ledger.tokens -= tokens
        ledger.left -= left
        self._work_left[engine] -= self._work(tokens, left)


POLICIES = ("turn-barrier", "static", "least-in-flight", "kv", "adaptive")


def make_policy(name: str, *, max_context: int, predictor: LengthPredictor) -> Policy:
    """A new policy by its name. max_context: tokens of the longest prompt and response; predictor: for `adaptive`."""
    match name:
        case "turn-barrier":
            return TurnBarrier()
        case "static":
            return Static()
        case "least-in-flight":
            return LeastInFlight()
        case "kv":
            return KvCapacity(max_context)
        case "adaptive":
            return Adaptive(predictor)
    raise ValueError(f"scheduler {name!r} is none of {', '.join(POLICIES)}")


class _Ledger:
    """The rollouts whose home an engine is: (context tokens, expected tokens to come) when last heard of, and their sums."""

    __slots__ = ("left", "rollouts", "tokens")

    def __init__(self) -> None:
        self.rollouts: dict[int, tuple[float, float]] = {}
        self.tokens = self.left = 0.0
