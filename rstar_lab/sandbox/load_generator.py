"""Run many calls on a sandbox and record their latency and outcome. Used by notebooks and benchmarks."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from rstar_lab.outcomes import Outcome
from rstar_lab.sandbox.interface import Sandbox

SHORT = "print(1+1)"
NUMPY = "import numpy as np\nprint(np.arange(1000).sum())"
SYMPY = "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - 5*x + 6, x))"
BROKEN = "print(1/0)"
ENDLESS = "while True: pass"
MIX = ((SHORT, 0.70), (NUMPY, 0.15), (SYMPY, 0.10), (BROKEN, 0.03), (ENDLESS, 0.02))


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished call. kind: label of the call. at_s: when its result arrived, in seconds since the start of the load."""

    kind: str
    outcome: Outcome
    at_s: float
    latency_s: float
    queue_s: float
    duration_s: float


def mixed(count: int, seed: int = 0) -> list[str]:
    """Return programs in the shares of MIX, in a fixed random order."""
    codes = [code for code, share in MIX for _ in range(round(share * count))]
    random.Random(seed).shuffle(codes)
    return codes


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
