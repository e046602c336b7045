"""A call to the sandbox, its output while it runs, and its result."""

import asyncio
import codecs
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome

# Of pydantic, which validates calls of clients: unknown keys are an error.
FORBID: Any = {"extra": "forbid"}
MAX_SEED = 2**63
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """Code to run. A limit of None means the sandbox's default.

    stdin: text on the standard input. seed: seeds the random generators; None draws fresh randomness.
    timeout_s: seconds on a CPU or asleep (`Limits`). memory_mb: MiB of all processes of the call.
    session: name of an interpreter that keeps its state between calls, started by its first call; None runs the code in a
    new process.
    """

    code: str
    stdin: str = ""
    seed: int | None = None
    timeout_s: float | None = None
    memory_mb: int | None = None
    session: str | None = None
    kind: Literal["code"] = field(default="code", kw_only=True, repr=False)
    __pydantic_config__: ClassVar = FORBID

    def __post_init__(self) -> None:
        if self.seed is not None and not -MAX_SEED <= self.seed < MAX_SEED:
            raise ValueError("seed: must lie between -2**63 and 2**63")
        if self.session is not None and not 0 < len(self.session) <= 256:
            raise ValueError("session: the name must have 1 to 256 characters")
        for name in ("timeout_s", "memory_mb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}: {value!r} must be greater than 0")


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call.

    outcome: how the call ended (`rstar_lab.common.outcomes`). stdout, stderr: output; invalid UTF-8 bytes become `\\xNN`.
    value: repr of the last expression, as a notebook shows it; None if there is none.
    duration_s: seconds the code ran. queue_s: seconds the call waited before it started.
    """

    outcome: Outcome
    stdout: str
    stderr: str
    value: str | None
    duration_s: float
    queue_s: float = 0.0


def failure(outcome: Outcome, message: str = "", *, duration_s: float = 0.0, queue_s: float = 0.0) -> CallResult:
    """Return the result of a call that did not run or whose result is lost. The message goes to stderr."""
    return CallResult(outcome, "", message, None, duration_s, queue_s)


async def result_of(work: Awaitable[CallResult]) -> CallResult:
    """Return the result of a call. An exception becomes a result: ValueError the caller's fault, any other the sandbox's."""
    try:
        return await work
    except (ValueError, RecursionError) as error:
        return failure(Outcome.INVALID_ARGUMENTS, str(error))
    except Exception as error:
        return failure(Outcome.SANDBOX_ERROR, f"{type(error).__name__}: {error}")


# The name of a copy of a session: the name of the first session, this separator, a random text.
COPY_SEPARATOR = "~"


class ForkError(RuntimeError):
    """The interpreter of a session cannot be forked."""


def first_session(name: str) -> str:
    """Return the name of the session from which this one was forked, directly or not. Both are on the same machine."""
    return name.partition(COPY_SEPARATOR)[0]


# Receives output as (1 for stdout or 2 for stderr, bytes).
OnOutput = Callable[[int, bytes], None]


@dataclass(frozen=True, slots=True)
class Output:
    """New output of a running call. Invalid UTF-8 bytes become `\\xNN`."""

    stream: Literal["stdout", "stderr"]
    text: str


class OutputDecoder:
    """Decodes the output of one call. A character may be split between two pieces of output."""

    def __init__(self) -> None:
        self._decoders = [codecs.getincrementaldecoder("utf-8")("backslashreplace") for _ in range(2)]

    def decode(self, number: int, data: bytes) -> Output:
        return Output("stdout" if number == 1 else "stderr", self._decoders[number - 1].decode(data))


async def stream_output(run: Callable[[OnOutput], Awaitable[CallResult]]) -> AsyncGenerator[Output | CallResult, None]:
    """Yield the output of a call while it runs, then its result. The call is cancelled if the generator is closed."""
    decoder = OutputDecoder()
    items: asyncio.Queue[Output | CallResult | None] = asyncio.Queue()

    def on_output(number: int, data: bytes) -> None:
        items.put_nowait(decoder.decode(number, data))

    task = asyncio.ensure_future(run(on_output))
    task.add_done_callback(lambda _: items.put_nowait(None))
    try:
        while (item := await items.get()) is not None:
            yield item
        yield task.result()
    finally:
        task.cancel()


_CALL_ID: ContextVar[str] = ContextVar("call_id", default="-")


@contextmanager
def call_id(name: str | None = None) -> Iterator[str]:
    """Add this id to all log messages of the block; without a name, a random id. Yields the id."""
    name = name or secrets.token_hex(4)
    token = _CALL_ID.set(name)
    try:
        yield name
    finally:
        _CALL_ID.reset(token)


def log_event(event: str, detail: str = "") -> None:
    """Log a failure of the sandbox's own processes during the current call."""
    log.warning("call %s: %s%s", _CALL_ID.get(), event, f": {detail}" if detail else "")


def log_failure(result: CallResult) -> None:
    """Log a result that is a failure of the infrastructure."""
    if result.outcome in INFRASTRUCTURE_FAILURES:
        reason = result.stderr.strip().splitlines()
        times = f"queued {result.queue_s:.2f} s, ran {result.duration_s:.2f} s"
        log.warning(
            "call %s: %s (%s)%s", _CALL_ID.get(), result.outcome, times, f": {reason[-1][:200]}" if reason else ""
        )
