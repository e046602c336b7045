"""Runs many calls on a sandbox and records their latency and outcome. Used by notebooks."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from rstar_lab.outcomes import Outcome
from rstar_lab.sandbox.interface import Sandbox


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished call. kind: label of the call. at_s: when its result arrived, in seconds since the start of the load."""

    kind: str
    outcome: Outcome
    at_s: float
    latency_s: float
    queue_s: float
    duration_s: float


async def run_load(
    sandbox: Sandbox, calls: Sequence[tuple[str, str]], *, in_flight: int, every_s: float = 0.5
) -> AsyncIterator[list[Sample]]:
    """Run (kind, code) pairs, `in_flight` at a time. Yields all samples so far every `every_s` seconds and at the end."""
    began = time.monotonic()
    samples: list[Sample] = []
    left = list(calls)[::-1]

    async def run_client() -> None:
        while left:
            kind, code = left.pop()
            asked = time.monotonic()
            result = await sandbox.run(code)
            now = time.monotonic()
            samples.append(Sample(kind, result.outcome, now - began, now - asked, result.queue_s, result.duration_s))

    clients = [asyncio.create_task(run_client()) for _ in range(in_flight)]
    running = set(clients)
    try:
        while running:
            _, running = await asyncio.wait(running, timeout=every_s)
            yield list(samples)
        for client in clients:
            client.result()
    finally:
        for client in clients:
            client.cancel()
