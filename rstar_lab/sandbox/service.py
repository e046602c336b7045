"""The service behind all protocols: admits calls, returns one result for each, and counts outcomes."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox.access import BusyError
from rstar_lab.sandbox.call import CallResult, OnOutput, failure
from rstar_lab.sandbox.call_log import call_id, log_failure
from rstar_lab.sandbox.wire import Work

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class _Events(Collector):
    """Counts events of the sandbox: failures of its processes, retries, refused and forked sessions."""

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self.read = read

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily("rstar_lab_sandbox_events", "events of this process's sandbox", labels=["event"])
        for event, count in self.read().items():
            family.add_metric([event], count)
        yield family


class Metrics:
    """Metrics with the prefix rstar_lab_sandbox_. Gauges are read at each scrape."""

    def __init__(
        self, gauges: dict[str, tuple[str, Callable[[], float]]], events: Callable[[], Mapping[str, int]]
    ) -> None:
        """gauges: name -> (description, function that returns the value). events: returns event -> count."""
        self.registry = registry = CollectorRegistry()
        prefix = "rstar_lab_sandbox_"
        arrival = "seconds from the arrival of a call to its"
        self.latency = Histogram(
            f"{prefix}call_seconds", f"{arrival} result", ["outcome"], buckets=SECONDS, registry=registry
        )
        self.queueing = Histogram(f"{prefix}queue_seconds", f"{arrival} start", buckets=SECONDS, registry=registry)
        self.refused = Counter(f"{prefix}refused", "calls refused because the queue was full", registry=registry)
        for name, (description, read) in gauges.items():
            Gauge(f"{prefix}{name}", description, registry=registry).set_function(read)
        registry.register(_Events(events))

    def observe(self, result: CallResult, seconds: float) -> None:
        """Count a result. seconds: from the arrival of its call."""
        self.latency.labels(result.outcome.value).observe(seconds)
        self.queueing.observe(result.queue_s)

    def page(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


class Backend(Protocol):
    """Runs the work: on this machine (serve.LocalBackend) or on the workers of a Redis (redis_backend.py)."""

    @property
    def queued(self) -> int:
        """Calls that have not started."""

    @property
    def capacity(self) -> int:
        """Calls that run at full priority at once."""

    @property
    def zygotes(self) -> int:
        """Running zygotes of this process; 0 if the backend has none."""

    @property
    def sessions(self) -> int:
        """Live sessions of this process; 0 if the backend has none."""

    @property
    def events(self) -> Mapping[str, int]:
        """Event -> how often it happened in this process; empty if the backend has none."""

    async def run(self, work: Work, on_output: OnOutput | None = None) -> CallResult:
        """Run work. on_output: receives output while it runs; a backend can ignore it."""
        ...

    async def aclose(self) -> None: ...


class Service:
    """A backend with a bounded queue and metrics.

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
        self.metrics = Metrics(
            {
                "queue_depth": ("calls that have not started", lambda: backend.queued),
                "in_flight": ("calls accepted and not answered", lambda: self.calls),
                "workers": ("calls that run at full priority at once", lambda: backend.capacity),
                "zygotes": ("live zygotes of this process", lambda: backend.zygotes),
                "sessions": ("sessions of this process whose state is kept", lambda: backend.sessions),
            },
            lambda: backend.events,
        )

    def admit(self, calls: int) -> None:
        """Count calls as accepted, or raise BusyError if the queue is full or the service stops.

        A request with more than `max_calls` calls is accepted if no other call is in flight.
        """
        if self.draining or (self.calls and self.calls + calls > self.max_calls):
            self._refuse(calls)
        self.calls += calls

    def release(self, calls: int) -> None:
        """Release admitted calls."""
        self.calls -= calls

    def reserve_bytes(self, size: int) -> None:
        """Count bytes of a request or response as held, or raise BusyError if there is no room."""
        if not self.has_room(size):
            self._refuse(1)
        self.bytes += size

    def has_room(self, size: int) -> bool:
        return not self.bytes or self.bytes + size <= self.max_bytes

    def hold_bytes(self, size: int) -> None:
        """Count bytes as held without checking the limit."""
        self.bytes += size

    def release_bytes(self, size: int) -> None:
        self.bytes -= size

    def _refuse(self, calls: int) -> None:
        self.metrics.refused.inc(calls)
        raise BusyError(stopping=self.draining)

    async def run(self, work: Work, on_output: OnOutput | None = None) -> CallResult:
        """Run admitted work and return its result. Exceptions of the backend become results with an outcome."""
        with call_id():
            result = await self._run(work, on_output)
            log_failure(result)
        return result

    async def _run(self, work: Work, on_output: OnOutput | None) -> CallResult:
        started = time.monotonic()
        task = asyncio.create_task(self.backend.run(work, on_output))
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
        self.metrics.observe(result, time.monotonic() - started)
        return result

    async def drain(self, seconds: float) -> None:
        """Refuse new calls, wait up to `seconds` for accepted ones, then answer the rest with `sandbox_error`."""
        self.draining = True
        deadline = time.monotonic() + seconds
        while self.calls and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for task in list(self.running):
            task.cancel()
