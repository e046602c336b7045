"""`rstar-lab sandbox top`: shows the load of a running service, read from its /metrics."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rstar_lab.errors import UserError

PREFIX = "rstar_lab_sandbox_"
QUANTILES = (0.5, 0.99)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The metrics of a service at one time. time_s: seconds. samples: (name without prefix, label value) -> value."""

    time_s: float
    samples: dict[tuple[str, str], float]
    buckets: dict[float, float]

    @classmethod
    def parse(cls, text: str, time_s: float) -> "Snapshot":
        """Parse a page of /metrics. buckets: upper bound of the latency (s) -> calls, of all outcomes together."""
        samples: dict[tuple[str, str], float] = {}
        buckets: dict[float, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                if name == "call_seconds_bucket":
                    bound = float(sample.labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + sample.value
                elif not name.endswith(("_bucket", "_created")):
                    label = next(iter(sample.labels.values()), "")
                    samples[name, label] = sample.value
        return cls(time_s, samples, buckets)

    def get(self, name: str, label: str = "") -> float:
        return self.samples.get((name, label), 0.0)

    def labels(self, name: str) -> list[str]:
        return sorted(label for key, label in self.samples if key == name)


def fetch(url: str, token: str | None, time_s: float) -> Snapshot:
    """Return the metrics of a service. Raises UserError if it does not answer."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        reply = httpx.get(f"{url.rstrip('/')}/metrics", headers=headers, timeout=10, trust_env=False)
        reply.raise_for_status()
    except httpx.HTTPError as error:
        raise UserError(f"{url}: cannot read the metrics of a sandbox service: {error}") from error
    return Snapshot.parse(reply.text, time_s)


def rates(before: Snapshot, now: Snapshot) -> dict[str, Any]:
    """Return what happened between two snapshots: calls per second by outcome, latency, load, and events in total."""
    seconds = max(1e-6, now.time_s - before.time_s)
    outcomes = {
        outcome: (now.get("call_seconds_count", outcome) - before.get("call_seconds_count", outcome)) / seconds
        for outcome in now.labels("call_seconds_count")
    }
    buckets = {bound: count - before.buckets.get(bound, 0.0) for bound, count in now.buckets.items()}
    return {
        "calls_per_s": round(sum(outcomes.values()), 2),
        "by_outcome": {outcome: round(rate, 2) for outcome, rate in outcomes.items() if rate},
        **{f"p{100 * share:g}_s": quantile(buckets, share) for share in QUANTILES},
        **{name: int(now.get(name)) for name in ("in_flight", "queue_depth", "workers", "zygotes", "sessions")},
        "refused": int(now.get("refused_total")),
        "events": {event: int(now.get("events_total", event)) for event in now.labels("events_total")},
    }


def quantile(buckets: dict[float, float], share: float) -> float | None:
    """Return the upper bound of the bucket that holds this quantile; None if there are no calls.

    buckets: upper bound -> calls at or below it.
    """
    total = max(buckets.values(), default=0.0)
    if not total:
        return None
    return next(bound for bound, count in sorted(buckets.items()) if count >= share * total)


def table(values: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a table."""
    for name, value in values.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number:g}" for key, number in value.items()) or "none"
        yield f"{name:12} {'-' if value is None else value}"
