"""Prometheus metrics of the service."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from rstar_lab.sandbox.call import CallResult

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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
        self.registry = CollectorRegistry()
        self.latency = Histogram(
            "rstar_lab_sandbox_call_seconds",
            "seconds from the arrival of a call to its result",
            ["outcome"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.queueing = Histogram(
            "rstar_lab_sandbox_queue_seconds",
            "seconds from the arrival of a call to its start",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.refused = Counter(
            "rstar_lab_sandbox_refused", "calls refused because the queue was full", registry=self.registry
        )
        self.tenants = Counter(
            "rstar_lab_sandbox_tenant_calls", "results by tenant", ["tenant", "outcome"], registry=self.registry
        )
        for name, (description, read) in gauges.items():
            Gauge(f"rstar_lab_sandbox_{name}", description, registry=self.registry).set_function(read)
        self.registry.register(_Events(events))

    def observe(self, result: CallResult, seconds: float) -> None:
        """Count a result. seconds: from the arrival of its call."""
        self.latency.labels(result.outcome.value).observe(seconds)
        self.queueing.observe(result.queue_s)

    def page(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
