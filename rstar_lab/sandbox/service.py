"""The service behind all protocols: admits calls and returns one result for each."""

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox.access import BusyError
from rstar_lab.sandbox.call import CallResult, OnOutput, call_id, failure, log_failure, result_of
from rstar_lab.sandbox.wire import Work


class Backend(Protocol):
    """Runs the work: on this machine (serve.LocalBackend) or on the workers of a Redis (redis_backend.py)."""

    @property
    def gauges(self) -> Mapping[str, int]:
        """At least `queue_depth` (calls that have not started) and `workers` (calls that run at full priority at once)."""

    async def run(self, work: Work, on_output: OnOutput | None = None) -> CallResult:
        """Run work. on_output: receives output while it runs; a backend can ignore it."""
        ...

    async def aclose(self) -> None: ...


class Service:
    """A backend with a bounded queue.

    max_calls: calls in flight. max_bytes: bytes of all requests and unread responses that are held in memory.
    """

    def __init__(self, backend: Backend, *, max_calls: int, max_bytes: int) -> None:
        self.backend = backend
        self.max_calls = max_calls
        self.max_bytes = max_bytes
        self.calls = 0
        self.bytes = 0
        self.draining = False
        self.running: set[asyncio.Task[CallResult]] = set()

    def admit(self, calls: int) -> None:
        """Count calls as accepted, or raise BusyError if the queue is full or the service stops.

        A request with more than `max_calls` calls is accepted if no other call is in flight.
        """
        if self.draining or (self.calls and self.calls + calls > self.max_calls):
            raise BusyError(stopping=self.draining)
        self.calls += calls

    def release(self, calls: int) -> None:
        """Release admitted calls."""
        self.calls -= calls

    def reserve_bytes(self, size: int) -> None:
        """Count bytes of a request or response as held, or raise BusyError if there is no room."""
        if not self.has_room(size):
            raise BusyError(stopping=self.draining)
        self.bytes += size

    def has_room(self, size: int) -> bool:
        return not self.bytes or self.bytes + size <= self.max_bytes

    def hold_bytes(self, size: int) -> None:
        """Count bytes as held without checking the limit; a negative size releases them."""
        self.bytes += size

    async def run(self, work: Work, on_output: OnOutput | None = None) -> CallResult:
        """Run admitted work and return its result. Exceptions of the backend become results with an outcome."""
        with call_id():
            task = asyncio.create_task(result_of(self.backend.run(work, on_output)))
            self.running.add(task)
            try:
                result = await task
            except asyncio.CancelledError:
                if not task.cancelled() or not self.draining:
                    raise
                result = failure(Outcome.SANDBOX_ERROR, "the service stopped before this call was done")
            finally:
                self.running.discard(task)
                task.cancel()
            log_failure(result)
        return result

    async def drain(self, seconds: float) -> None:
        """Refuse new calls, wait up to `seconds` for accepted ones, then answer the rest with `sandbox_error`."""
        self.draining = True
        deadline = time.monotonic() + seconds
        while self.calls and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for task in list(self.running):
            task.cancel()
