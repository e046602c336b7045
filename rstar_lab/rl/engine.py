"""The protocol of inference engines: token ids in, token ids out, no text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # a stop token
    LENGTH = "length"  # max_tokens
    ABORTED = "aborted"  # by `Interruptible.interrupt`; a later request may continue it


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one completion. `seed` determines the result, whatever else is in the batch."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a request.

    token_ids: the sampled tokens, including the stop token. log_probs: log-prob of each sampled token under the
    distribution it was sampled from (after temperature); same length. engine: name of the engine. policy_version:
    version of the weights that sampled the last token. versions: if the weights changed during the request, the
    (policy version, number of tokens) of its consecutive parts; otherwise ().
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    engine: str = ""
    policy_version: int = 0
    versions: tuple[tuple[int, int], ...] = ()

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(policy version, number of tokens) of each consecutive part; () without tokens."""
        single_part = ((self.policy_version, len(self.token_ids)),) if self.token_ids else ()
        return self.versions or single_part


class EngineError(RuntimeError):
    """An engine died, stopped responding or rejected the request; another engine may serve it."""


class RequestRefused(EngineError):
    """The request itself is invalid: every engine would reject it."""


class Engine(Protocol):
    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Sample one completion. Cancelling the call also cancels the request in the engine. Raises EngineError."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """An engine that can return unfinished requests."""

    def interrupt(self) -> None:
        """End every request with the tokens generated so far, as FinishReason.ABORTED."""
        ...


class EngineSlot(Engine, Protocol):
    """The engine that one rollout uses. Each of its turns is sent to one of the run's engines."""

    def on_turn(self, text: str, last: bool) -> None:
        """Called after each turn, before its tools run."""

    def leave(self) -> None:
        """Called when the rollout has ended, also after an error."""


Slots = Callable[[int, Any], EngineSlot]  # (index in the step, task of the rollout) -> its slot


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """A turn after the first that the model has written, before its tools run.

    Attributes:
        log_probs, first_log_probs: of the tokens of this turn, and of the first turn of the rollout.
        before: returns the rollout before this turn.
        context: context of the rollout.
    """

    log_probs: Sequence[float]
    first_log_probs: Sequence[float]
    before: Callable[[], Any]
    context: Any


class SlotWrapper:
    """Base class of the slots that a method wraps around those of the rollouts; see `MethodHooks.wrap_slots`. It changes nothing."""

    def __init__(self, slot: Any):
        self.slot = slot

    async def begin(self, task: Any) -> Any:
        """Return the task of the rollout. Called before the rollout starts."""
        return await self.slot.begin(task) if isinstance(self.slot, SlotWrapper) else task

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        return await self.slot.generate(prompt_ids, sampling)

    async def on_written(self, turn: WrittenTurn) -> None:
        """Called after each turn but the first, before its tools run."""
        if isinstance(self.slot, SlotWrapper):
            await self.slot.on_written(turn)

    def on_turn(self, text: str, last: bool) -> None:
        self.slot.on_turn(text, last)

    def leave(self) -> None:
        self.slot.leave()

    def finish(self, trajectory: Any) -> Any:
        """Return the rollout as it is stored. Called after its end."""
        return self.slot.finish(trajectory) if isinstance(self.slot, SlotWrapper) else trajectory
