"""The interface between the scheduler and a dispatch policy.

A dispatch policy decides which waiting turn goes to which engine, and when. The policies are in `policies` and `adaptive`; the
scheduler and the simulator use the same ones. A policy has no clock and does no I/O. The scheduler reports events and then asks
for dispatches:

    policy.ready(request)                       a turn can be generated: the first of a rollout, or its tools have answered
    policy.finished(request, generated, done)   an engine returned `generated` tokens; done: the rollout has ended
    for request, engine in policy.dispatch(engines): ...

If an engine fails during a turn, set its `alive` to False and pass the same request to `ready` again; the policy chooses another
engine. To abandon a rollout, call `finished(request, 0, done=True)`. Call `ready` for all rollouts of a step before the first
`dispatch`: policies that split rollouts evenly need to see all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn to generate.

    rollout: number of the rollout, unique in the step. tokens: length of the turn's prompt, including earlier turns and tool
    results. generated: tokens that the model generated in earlier turns.
    """

    rollout: int
    problem: str
    turn: int
    tokens: int
    generated: int


@dataclass(slots=True)
class EngineState:
    """The state of an engine that policies may use.

    kv_tokens: size of its KV cache in tokens. max_running: vLLM's max_num_seqs. alive: False while the engine cannot be used.
    """

    name: str
    kv_tokens: int
    max_running: int = 1024
    alive: bool = True


Dispatch = list[tuple[TurnRequest, int]]


class DispatchPolicy(Protocol):
    """See the module docstring. An engine is an index into the sequence passed to `dispatch`, which keeps its order."""

    def ready(self, request: TurnRequest) -> None: ...

    def finished(self, request: TurnRequest, generated: int, done: bool) -> None: ...

    def dispatch(self, engines: Sequence[EngineState]) -> Dispatch: ...


def alive_engines(engines: Sequence[EngineState]) -> list[int]:
    """Return the indices of the engines that are alive."""
    return [i for i, engine in enumerate(engines) if engine.alive]
