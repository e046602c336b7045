"""The service behind every protocol: admits calls, sees that each gets its one result, counts what happened."""

import asyncio
import time
from typing import Protocol

from rstar_lab.outcomes import Outcome
from rstar_lab.sandbox.call import CallResult
from rstar_lab.sandbox.metrics import Metrics
from rstar_lab.sandbox.wire import Work, failure


class Backend(Protocol):
    """What runs the work: this machine (local_backend.py) or the workers behind a Redis (redis_backend.py)."""

    @property
    def queued(self) -> int:
        """Calls that have not begun."""

    @property
    def capacity(self) -> int:
        """Calls that run at full priority at once."""

    @property
    def zygotes(self) -> int:
        """Live zygotes, where the backend has them itself."""

    @property
    def sessions(self) -> int:
        """Sessions whose state is kept, likewise."""

    async def run(self, work: Work) -> CallResult: ...

    async def aclose(self) -> None: ...


class BusyError(Exception):
    """The queue is full; try again after `retry_after_s`."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Service:
    """One backend, a bounded queue before it, metrics beside it."""

    def __init__(self, backend: Backend, *, max_calls: int, max_bytes: int) -> None:
        self.backend = backend
        self.max_calls = max_calls
        self.max_bytes = max_bytes
        self.calls = 0
        self.bytes = 0
        self.draining = False
        self.running: set[asyncio.Task[CallResult]] = set()
        self.recent = ThroughputEstimate()
        self.metrics = Metrics(
            {
                "queue_depth": ("calls that have not begun", lambda: backend.queued),
                "in_flight": ("calls accepted and not answered", lambda: self.calls),
                "workers": ("calls that run at full priority at once", lambda: backend.capacity),
                "zygotes": ("live zygotes of this process", lambda: backend.zygotes),
                "sessions": ("sessions of this process whose state is kept", lambda: backend.sessions),
            }
        )

    def admit(self, calls: int, size: int) -> None:
        """Make room for so many calls of so many bytes, or raise BusyError: nothing is accepted that could be lost.

        One request larger than all the room is taken when nothing else is there, else it would never be.
        """
        full = self.calls + calls > self.max_calls or self.bytes + size > self.max_bytes
        if self.draining or (full and self.calls):
            self.metrics.refused.inc(calls)
            raise BusyError(self.recent.seconds_for(max(1, self.calls + calls - self.max_calls)))
        self.calls += calls
        self.bytes += size

    def release(self, calls: int, size: int) -> None:
        self.calls -= calls
        self.bytes -= size

    async def run(self, work: Work) -> CallResult:
        """The result of admitted work. An error of ours is a result too."""
        started = time.monotonic()
        task = asyncio.create_task(self.backend.run(work))
        self.running.add(task)
        try:
            result = await task
        except asyncio.CancelledError:
            if not task.cancelled() or not self.draining:
                task.cancel()
                raise
            result = failure(Outcome.SANDBOX_ERROR, "the service stopped before this call was done")
        except ValueError as error:
            result = failure(Outcome.INVALID_ARGUMENTS, str(error))
        except Exception as error:
            result = failure(Outcome.SANDBOX_ERROR, f"{type(error).__name__}: {error}")
        finally:
            self.running.discard(task)
        self.recent.tick()
        self.metrics.observe(result, time.monotonic() - started)
        return result

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let what was accepted come to its end, then answer the rest as our error."""
        self.draining = True
        deadline = time.monotonic() + seconds
        while self.calls and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for task in list(self.running):
            task.cancel()


class ThroughputEstimate:
    """How fast results come, for the advice when to try again."""

    def __init__(self) -> None:
        self.per_s = 0.0
        self.last = time.monotonic()

    def tick(self) -> None:
        """Count one result: an average over about the last 100."""
        now = time.monotonic()
        gap, self.last = max(now - self.last, 1e-6), now
        self.per_s += (1 / gap - self.per_s) * min(1.0, gap) if self.per_s else 1 / gap

    def seconds_for(self, calls: int) -> int:
        return int(min(5, max(1, calls / self.per_s))) if self.per_s else 1
