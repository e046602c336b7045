"""The `adaptive` dispatch policy: admission by projected KV-cache use, with predicted response lengths."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

import numpy as np

from rstar_lab.rl.scheduling.base import Dispatch, EngineState, TurnRequest, alive_engines
from rstar_lab.rl.scheduling.lengths import LengthPredictor


class Adaptive:
    """Admit as many rollouts to an engine as its KV cache is expected to hold; longest expected first; balance the work.

    Admission: the total context of an engine's rollouts is projected forward with their expected remaining tokens. A
    new rollout is sent to an engine if the maximum of the projection stays below a share of the KV cache. Rollouts
    that wait for a tool count, so that their prefix stays cached. Each expected length is replaced by three equally
    likely lengths (`SPREAD`).

    Order: first `PROBES` rollouts of each problem, to predict its lengths; then the problem with the longest prediction.

    Balance: work is measured in token-steps, the number of context tokens that all remaining decode steps read. A new
    rollout goes to the engine with the least work. A later turn stays with its engine and its cached prefix, unless
    that engine has more work than another by `MARGIN` times the work of the longest possible rollout.

    The share is chosen from `FILL` at the first dispatch: the first value if the longest rollout takes more decode steps
    than all rollouts together take with full caches (it then decides the makespan and must not be preempted), else the
    second.
    """

    SPREAD = np.array([0.5, 0.9, 1.6])  # means of the thirds of a lognormal with sigma 0.6, divided by its mean
    FILL = (0.8, 0.9)
    PROBES = 2
    MARGIN = 1.5
    TOKEN_WORK = 400  # cost of a token's arithmetic, in units of context tokens read

    def __init__(self, predictor: LengthPredictor) -> None:
        self.predictor = predictor
        self._fill = self.FILL[0]
        self._margin = self.MARGIN * self._work(0.0, predictor.max_tokens)
        self._engine_of: dict[int, int] = {}  # rollout -> engine
        self._next_turns: list[TurnRequest] = []
        self._resumed: deque[TurnRequest] = deque()  # rollouts with tokens but without an engine
        self._new: dict[str, deque[TurnRequest]] = {}  # problem -> first turns that wait for admission
        self._started: dict[str, int] = {}  # problem -> number of admitted rollouts
        self._queue: list[tuple[int, float, str]] = []  # heap of problems; entries may be outdated or duplicated
        self._loads: list[_EngineLoad] = []
        self._work_left: list[float] = []
        # Engines that may admit a rollout. The others are full until one of their rollouts finishes a turn.
        self._open: set[int] = set()

    def ready(self, request: TurnRequest) -> None:
        if request.rollout in self._engine_of:
            self._next_turns.append(request)
        elif request.generated:
            self._resumed.append(request)
        else:
            waiting = self._new.setdefault(request.problem, deque())
            if not waiting:
                heappush(self._queue, self._rank(request.problem))
            waiting.append(request)

    def finished(self, request: TurnRequest, generated: int, done: bool) -> None:
        engine = self._engine_of[request.rollout]
        self._remove(request.rollout, engine)
        self._open.add(engine)
        total = request.generated + generated
        if not done:
            self.predictor.progress(request.problem, total, request.rollout)
            left = self.predictor.remaining(request.problem, total)
            self._add(request.rollout, engine, request.tokens + generated, left)
            return
        del self._engine_of[request.rollout]
        if generated:
            self.predictor.observe(request.problem, total, request.rollout)
            if self._new.get(request.problem):
                heappush(self._queue, self._rank(request.problem))

    def dispatch(self, engines: Sequence[EngineState]) -> Dispatch:
        if not self._loads:
            self._loads = [_EngineLoad() for _ in engines]
            self._work_left = [0.0] * len(engines)
            self._open = set(range(len(engines)))
            self._fill = self.FILL[self._steps_at_full_caches(engines) > self.predictor.max_tokens]
        # An engine that restarted has no rollouts, so no finished turn would open it.
        self._open.update(i for i in alive_engines(engines) if not self._loads[i].rollouts)
        sent: Dispatch = []
        for request in self._next_turns:
            self._place_next_turn(request, engines, sent)
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
        """Return the expected number of decode steps for the waiting rollouts if every KV cache is full."""
        occupied = 0.0  # token-steps
        for problem, waiting in self._new.items():
            left = self.predictor.remaining(problem)
            occupied += sum(left * (request.tokens + left / 2) for request in waiting)
        return occupied / sum(engines[i].kv_tokens for i in alive_engines(engines))

    def _rank(self, problem: str) -> tuple[int, float, str]:
        probed = min(self._started.get(problem, 0), self.PROBES)
        return probed, -self.predictor.remaining(problem), problem

    def _place_next_turn(self, request: TurnRequest, engines: Sequence[EngineState], sent: Dispatch) -> None:
        """Send a later turn to its engine, or to another one that has much less work."""
        current = self._engine_of[request.rollout]
        self._remove(request.rollout, current)
        if not engines[current].alive:
            del self._engine_of[request.rollout]
            self._resumed.append(request)
            return
        left = self.predictor.remaining(request.problem, request.generated)
        work = self._work_left
        least = min(work)
        engine = current
        if work[current] - least > self._margin:
            other = work.index(least)
            if engines[other].alive and self._fits(other, engines[other], request.tokens, left):
                engine = other
        self._send(request, engine, left, sent)

    def _admit(self, request: TurnRequest, engines: Sequence[EngineState], sent: Dispatch) -> bool:
        """Send a rollout to the engine with the least work that can admit it; return False if no engine can."""
        left = self.predictor.remaining(request.problem, request.generated)
        while self._open:
            engine = min(self._open, key=self._work_left.__getitem__)
            if engines[engine].alive and self._fits(engine, engines[engine], request.tokens, left):
                self._send(request, engine, left, sent)
                return True
            self._open.remove(engine)
        return False

    def _send(self, request: TurnRequest, engine: int, left: float, sent: Dispatch) -> None:
        self._engine_of[request.rollout] = engine
        self._add(request.rollout, engine, request.tokens, left)
        sent.append((request, engine))

    def _fits(self, engine: int, state: EngineState, tokens: float, left: float) -> bool:
        """Return whether the projected context stays below the limit with one more rollout. An empty engine admits any
        rollout."""
        load = self._loads[engine]
        limit = self._fill * state.kv_tokens
        rollouts = load.rollouts
        if not rollouts:
            return True
        if len(rollouts) >= state.max_running:
            return False
        if load.tokens + tokens + self.SPREAD[-1] * (load.left + left) < limit:
            return True
        # The total context is largest just before a rollout ends. At step ends[order[i]], the first i + 1 rollouts in
        # `order` still run, and each of them has grown by that many tokens. Each rollout counts three times, with a
        # third of the weight.
        pairs = np.array([*rollouts.values(), (tokens, left)])
        ends = np.outer(pairs[:, 1], self.SPREAD).ravel()
        order = ends.argsort()[::-1]
        present = np.repeat(pairs[:, 0], len(self.SPREAD))[order].cumsum()
        grown = ends[order] * np.arange(1, len(order) + 1)
        return float((present + grown).max()) < limit * len(self.SPREAD)

    @classmethod
    def _work(cls, tokens: float, left: float) -> float:
        return left * (tokens + left / 2 + cls.TOKEN_WORK)

    def _add(self, rollout: int, engine: int, tokens: float, left: float) -> None:
        load = self._loads[engine]
        load.rollouts[rollout] = (tokens, left)
        load.tokens += tokens
        load.left += left
        self._work_left[engine] += self._work(tokens, left)

    def _remove(self, rollout: int, engine: int) -> None:
        load = self._loads[engine]
        tokens, left = load.rollouts.pop(rollout)
        load.tokens -= tokens
        load.left -= left
        self._work_left[engine] -= self._work(tokens, left)


@dataclass(slots=True)
class _EngineLoad:
    """Rollouts of one engine: (context tokens, expected remaining tokens) when they were last updated, and the sums of both."""

    rollouts: dict[int, tuple[float, float]] = field(default_factory=dict)
    tokens: float = 0.0
    left: float = 0.0
