"""Dispatch policies that the others are compared with. In a recipe: `engine.scheduler: benchmarks.barrier:TurnBarrier`."""

from collections.abc import Sequence

from rstar_lab.rl.scheduling.base import Dispatch, EngineState, TurnRequest, alive_engines


class Static:
    """Split the rollouts over the engines in equal contiguous shares. Send every turn at once."""

    def __init__(self) -> None:
        self._engine_of: dict[int, int] = {}  # rollout -> engine
        self._waiting: list[TurnRequest] = []

    def ready(self, request: TurnRequest) -> None:
        self._waiting.append(request)

    def finished(self, request: TurnRequest, generated: int, done: bool) -> None:
        if done:
            del self._engine_of[request.rollout]

    def dispatch(self, engines: Sequence[EngineState]) -> Dispatch:
        waiting, self._waiting = self._waiting, []
        _split(waiting, self._engine_of, engines)
        return [(request, self._engine_of[request.rollout]) for request in waiting]


def _split(waiting: Sequence[TurnRequest], engine_of: dict[int, int], engines: Sequence[EngineState]) -> None:
    """Assign the rollouts that have no live engine to live engines, in equal contiguous shares."""
    unassigned = [r for r in waiting if r.rollout not in engine_of or not engines[engine_of[r.rollout]].alive]
    if unassigned:
        alive = alive_engines(engines)
        for i, request in enumerate(unassigned):
            engine_of[request.rollout] = alive[i * len(alive) // len(unassigned)]


class TurnBarrier:
    """Split the rollouts as `Static` does. An engine starts the next turn when all its rollouts have finished the current one."""

    def __init__(self) -> None:
        self._engine_of: dict[int, int] = {}  # rollout -> engine
        self._new: list[TurnRequest] = []
        self._held: dict[int, list[TurnRequest]] = {}  # engine -> turns that wait for the barrier
        self._unfinished: dict[int, set[int]] = {}  # engine -> rollouts that generate, or wait for a tool

    def ready(self, request: TurnRequest) -> None:
        self._new.append(request)

    def finished(self, request: TurnRequest, generated: int, done: bool) -> None:
        if done:
            self._unfinished[self._engine_of.pop(request.rollout)].discard(request.rollout)

    def dispatch(self, engines: Sequence[EngineState]) -> Dispatch:
        for engine in [e for e in self._held if not engines[e].alive]:
            self._new += self._held.pop(engine)
        for request in self._new:  # the previous turn of the rollout has ended
            if request.rollout in self._engine_of:
                self._unfinished[self._engine_of[request.rollout]].discard(request.rollout)
        _split(self._new, self._engine_of, engines)
        for request in self._new:
            self._held.setdefault(self._engine_of[request.rollout], []).append(request)
        self._new = []
        sent: Dispatch = []
        for engine in [e for e in self._held if not self._unfinished.get(e)]:
            requests = self._held.pop(engine)
            self._unfinished[engine] = {request.rollout for request in requests}
            sent += [(request, engine) for request in requests]
        return sent
