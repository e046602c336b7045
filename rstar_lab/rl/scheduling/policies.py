"""The dispatch policies by name: `adaptive`, and the rules of the paper and of verl."""

from collections import deque
from collections.abc import Sequence
from heapq import heapreplace

from rstar_lab.common.errors import UserError
from rstar_lab.rl.plugins import NAME, load_function
from rstar_lab.rl.scheduling.adaptive import Adaptive
from rstar_lab.rl.scheduling.base import Dispatch, DispatchPolicy, EngineState, TurnRequest, alive_engines
from rstar_lab.rl.scheduling.lengths import LengthPredictor


class LeastInFlight:
    """Send a rollout's first turn at once to the engine with the fewest requests in flight; later turns follow it (as in verl)."""

    def __init__(self) -> None:
        self._engine_of: dict[int, int] = {}  # rollout -> engine
        self._in_flight: dict[int, int] = {}
        self._generating: set[int] = set()  # rollouts whose turn is in flight
        self._waiting: list[TurnRequest] = []

    def ready(self, request: TurnRequest) -> None:
        self._end_turn(request.rollout)  # if its engine failed during the turn
        self._waiting.append(request)

    def finished(self, request: TurnRequest, generated: int, done: bool) -> None:
        self._end_turn(request.rollout)
        if done:
            del self._engine_of[request.rollout]

    def _end_turn(self, rollout: int) -> None:
        if rollout in self._generating:
            self._generating.remove(rollout)
            self._in_flight[self._engine_of[rollout]] -= 1

    def dispatch(self, engines: Sequence[EngineState]) -> Dispatch:
        sent: Dispatch = []
        for request in self._waiting:
            engine = self._engine_of.get(request.rollout)
            if engine is None or not engines[engine].alive:
                engine = min(alive_engines(engines), key=lambda i: self._in_flight.get(i, 0))
                self._engine_of[request.rollout] = engine
            self._in_flight[engine] = self._in_flight.get(engine, 0) + 1
            self._generating.add(request.rollout)
            sent.append((request, engine))
        self._waiting = []
        return sent


class KvCapacity:
    """Admit as many rollouts to an engine as its KV cache holds at the maximum length (rStar2-Agent, section on infrastructure).

    max_tokens: prompt plus response of the longest rollout, in tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._engine_of: dict[int, int] = {}  # rollout -> engine
        self._rollouts: dict[int, int] = {}  # engine -> number of admitted rollouts
        self._queue: deque[TurnRequest] = deque()  # turns of rollouts that are not admitted
        self._next_turns: list[TurnRequest] = []
        self._places: dict[int, int] = {}  # engine -> rollouts that its KV cache holds, at the last dispatch
        self._changed = False  # whether a rollout arrived or ended, or an engine got places, since the last admission

    def ready(self, request: TurnRequest) -> None:
        if request.rollout in self._engine_of:
            self._next_turns.append(request)
        else:
            self._queue.append(request)
            self._changed = True

    def finished(self, request: TurnRequest, generated: int, done: bool) -> None:
        if done:
            self._rollouts[self._engine_of.pop(request.rollout)] -= 1
            self._changed = True

    def dispatch(self, engines: Sequence[EngineState]) -> Dispatch:
        sent: Dispatch = []
        for request in self._next_turns:
            engine = self._engine_of[request.rollout]
            if engines[engine].alive:
                sent.append((request, engine))
            else:
                self._rollouts[self._engine_of.pop(request.rollout)] -= 1
                self._queue.appendleft(request)
                self._changed = True
        self._next_turns = []
        places = {i: max(engines[i].kv_tokens // self.max_tokens, 1) for i in alive_engines(engines)}
        self._changed |= any(count > self._places.get(i, 0) for i, count in places.items())
        self._places = places
        if self._queue and self._changed:
            self._changed = False
            sent += self._admit()
        return sent

    def _admit(self) -> Dispatch:
        """Send each first turn to the engine with the most free places."""
        sent: Dispatch = []
        # A heap of (minus the number of free places, engine).
        free = sorted((self._rollouts.get(i, 0) - count, i) for i, count in self._places.items())
        while self._queue and free and free[0][0] < 0:
            minus_free, engine = free[0]
            request = self._queue.popleft()
            self._engine_of[request.rollout] = engine
            self._rollouts[engine] = self._rollouts.get(engine, 0) + 1
            sent.append((request, engine))
            heapreplace(free, (minus_free + 1, engine))
        return sent


POLICIES = ("least-in-flight", "kv", "adaptive")


def make_policy(name: str, *, max_context: int, predictor: LengthPredictor) -> DispatchPolicy:
    """Return a new policy by its name, or from the user's own `module:Class`, which is called without arguments.

    max_context: prompt plus response of the longest rollout, in tokens; used by `kv`. predictor: used by `adaptive`.
    Raises UserError if the user's object is not a dispatch policy, and ValueError for an unknown name.
    """
    if NAME.fullmatch(name):
        policy = load_function(name, "engine.scheduler", ())()
        if missing := [method for method in ("ready", "finished", "dispatch") if not hasattr(policy, method)]:
            raise UserError(
                f"engine.scheduler: {name} has no {', '.join(missing)} (see DispatchPolicy in scheduling/base.py)"
            )
        return policy
    match name:
        case "least-in-flight":
            return LeastInFlight()
        case "kv":
            return KvCapacity(max_context)
        case "adaptive":
            return Adaptive(predictor)
    raise ValueError(f"engine.scheduler: unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
