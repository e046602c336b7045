"""What an inference engine is: token ids in, token ids out. Text never crosses this border."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the model ended its turn
    LENGTH = "length"  # the token limit cut it
    ABORTED = "aborted"  # whoever drives the engine cut it; a later request may go on from here


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one completion. `seed` fixes it, whatever else is in the batch."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What came back.

    token_ids: the sampled tokens, the stop token included.
    log_probs: of each sampled token under the distribution it was drawn from (after temperature), same length.
    engine: name of the engine that made it; policy_version: of the weights it had.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    engine: str = ""
    policy_version: int = 0


class EngineError(RuntimeError):
    """An engine died, hung or refused; the request may be sent again elsewhere."""


class RequestRefused(EngineError):
    """The request itself is at fault: any other engine would refuse it too."""


class Engine(Protocol):
    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Sample one completion. A call that is cancelled is ended in the engine too. Raises EngineError."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """An engine that can hand back what it has: the others' requests are cancelled, and their tokens lost."""

    def interrupt(self) -> None:
        """End every request with the tokens that it has, as FinishReason.ABORTED."""
        ...
