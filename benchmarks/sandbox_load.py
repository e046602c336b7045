"""Load tests of a sandbox: run many calls, record their latency and outcome, and plot them. Requires the extra `analysis`."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rstar_lab.analysis.figure_theme import COLOURS, apply_theme, outcome_marker
from rstar_lab.common.outcomes import Outcome
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


def plot_load(samples: Sequence[Sample], *, bin_s: float = 0.5, mode: str = "light") -> go.Figure:
    """Plot calls answered per second, and the median and 99th percentile of their latency, over time.

    mode: "light" or "dark" page.
    """
    at = np.array([sample.at_s for sample in samples])
    latency_ms = 1000 * np.array([sample.latency_s for sample in samples])
    bins = np.arange(int(at.max() / bin_s) + 1) if len(at) else np.arange(0)
    inside = [latency_ms[(at >= index * bin_s) & (at < (index + 1) * bin_s)] for index in bins]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    seconds = (bins + 1) * bin_s
    figure.add_scatter(
        x=seconds, y=[len(group) / bin_s for group in inside], name="calls/s", line_color=COLOURS[0], row=1, col=1
    )
    for name, share, dash in (("p50", 50, "solid"), ("p99", 99, "dot")):
        values = [np.percentile(group, share) if len(group) else None for group in inside]
        figure.add_scatter(x=seconds, y=values, name=name, line={"color": COLOURS[1], "dash": dash}, row=2, col=1)
    figure.update_yaxes(title_text="calls/s", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="latency (ms)", type="log", row=2, col=1)
    figure.update_xaxes(title_text="seconds", row=2, col=1)
    figure.update_layout(height=420)
    apply_theme(figure, mode)
    return figure


def plot_outcomes(samples: Sequence[Sample], *, mode: str = "light") -> go.Figure:
    """Plot the share of each outcome per kind of call. Infrastructure failures are grey. mode: "light" or "dark" page."""
    kinds = list(dict.fromkeys(sample.kind for sample in samples))
    counts = Counter((sample.kind, sample.outcome) for sample in samples)
    totals = Counter(sample.kind for sample in samples)
    figure = go.Figure()
    for outcome in Outcome:
        shares = [counts[kind, outcome] / totals[kind] for kind in kinds]
        if any(shares):
            texts = [str(counts[kind, outcome] or "") for kind in kinds]
            marker = outcome_marker(outcome)
            figure.add_bar(y=kinds, x=shares, text=texts, name=outcome, orientation="h", marker=marker)
    figure.update_xaxes(title_text="share of calls", tickformat=".0%", range=[0, 1])
    figure.update_layout(barmode="stack", height=160 + 40 * len(kinds))
    apply_theme(figure, mode)
    return figure
