"""The service behind all protocols: admits calls, returns one result for each, and counts outcomes."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox.access import BusyError
from rstar_lab.sandbox.call import CallResult, OnOutput, call_id, failure, log_failure, result_of
from rstar_lab.sandbox.wire import Work

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
PREFIX = "rstar_lab_sandbox_"
GAUGES = {
    "queue_depth": "calls that have not started",
    "in_flight": "calls accepted and not answered",
    "workers": "calls that run at full priority at once",
    "zygotes": "live zygotes of this process",
    "sessions": "sessions of this process whose state is kept",
}


class Backend(Protocol):
    """Runs the work: on this machine (serve.LocalBackend) or on the workers of a Redis (redis_backend.py)."""

    @property
    def gauges(self) -> Mapping[str, int]:
        """Values of GAUGES; at least `queue_depth` and `workers`."""

    @property
    def events(self) -> Mapping[str, int]:
        """Event -> how often it happened in this process."""

    async def run(self, work: Work, on_output: OnOutput | None = None) -> CallResult:
        """Run work. on_output: receives output while it runs; a backend can ignore it."""
        ...

    async def aclose(self) -> None: ...


class Service(Collector):
    """A backend with a bounded queue and metrics, of which gauges and events are read at each scrape.

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
        self.registry = registry = CollectorRegistry()
        arrival = "seconds from the arrival of a call to its"
        self.latency = Histogram(
            f"{PREFIX}call_seconds", f"{arrival} result", ["outcome"], buckets=SECONDS, registry=registry
        )
        self.queueing = Histogram(f"{PREFIX}queue_seconds", f"{arrival} start", buckets=SECONDS, registry=registry)
        self.refused = Counter(f"{PREFIX}refused", "calls refused because the queue was full", registry=registry)
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        values = {**self.backend.gauges, "in_flight": self.calls}
        for name, description in GAUGES.items():
            yield GaugeMetricFamily(f"{PREFIX}{name}", description, value=values.get(name, 0))
        family = CounterMetricFamily(f"{PREFIX}events", "events of this process's sandbox", labels=["event"])
        for event, count in self.backend.events.items():
            family.add_metric([event], count)
        yield family

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
        """Count bytes as held without checking the limit; a negative size releases them."""
        self.bytes += size

    def _refuse(self, calls: int) -> None:
        self.refused.inc(calls)
        raise BusyError(stopping=self.draining)

    async def run(self, work: Work, on_output: OnOutput | None = None) -> CallResult:
        """Run admitted work and return its result. Exceptions of the backend become results with an outcome."""
        started = time.monotonic()
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
        self.latency.labels(result.outcome.value).observe(time.monotonic() - started)
        self.queueing.observe(result.queue_s)
        return result

    async def drain(self, seconds: float) -> None:
        """Refuse new calls, wait up to `seconds` for accepted ones, then answer the rest with `sandbox_error`."""
        self.draining = True
        deadline = time.monotonic() + seconds
        while self.calls and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for task in list(self.running):
            task.cancel()
