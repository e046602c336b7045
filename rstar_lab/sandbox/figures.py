"""Figures of a load test of a sandbox. Requires plotly (the `notebooks` extra)."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rstar_lab.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.sandbox.load_generator import Sample

GOOD, MODELS, OUR = "#2a9d8f", ("#e9c46a", "#f4a261", "#e76f51", "#bc6c25", "#9b5de5", "#577590"), "#6c757d"


def plot_load(samples: Sequence[Sample], *, bin_s: float = 0.5) -> go.Figure:
    """Plot calls answered per second, and the median and 99th percentile of their latency, over time."""
    at = np.array([sample.at_s for sample in samples])
    latency_ms = 1000 * np.array([sample.latency_s for sample in samples])
    bins = np.arange(int(at.max() / bin_s) + 1) if len(at) else np.arange(0)
    inside = [latency_ms[(at >= index * bin_s) & (at < (index + 1) * bin_s)] for index in bins]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    seconds = (bins + 1) * bin_s
    figure.add_scatter(
        x=seconds, y=[len(group) / bin_s for group in inside], name="calls/s", line_color=GOOD, row=1, col=1
    )
    for name, share, dash in (("p50", 50, "solid"), ("p99", 99, "dot")):
        values = [np.percentile(group, share) if len(group) else None for group in inside]
        figure.add_scatter(x=seconds, y=values, name=name, line={"color": MODELS[2], "dash": dash}, row=2, col=1)
    figure.update_yaxes(title_text="calls/s", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="latency (ms)", type="log", row=2, col=1)
    figure.update_xaxes(title_text="seconds", row=2, col=1)
    return figure.update_layout(height=420, margin={"t": 30, "b": 40}, template="plotly_white")


def plot_outcomes(samples: Sequence[Sample]) -> go.Figure:
    """Plot the share of each outcome per kind of call. Failures of the infrastructure are grey."""
    kinds = list(dict.fromkeys(sample.kind for sample in samples))
    counts = Counter((sample.kind, sample.outcome) for sample in samples)
    totals = Counter(sample.kind for sample in samples)
    figure = go.Figure()
    for outcome in Outcome:
        shares = [counts[kind, outcome] / totals[kind] for kind in kinds]
        if any(shares):
            texts = [str(counts[kind, outcome] or "") for kind in kinds]
            figure.add_bar(y=kinds, x=shares, text=texts, name=outcome, orientation="h", marker_color=colour(outcome))
    figure.update_xaxes(title_text="share of calls", tickformat=".0%", range=[0, 1])
    return figure.update_layout(
        barmode="stack", height=120 + 40 * len(kinds), margin={"t": 30}, template="plotly_white"
    )


def colour(outcome: Outcome) -> str:
    if outcome is Outcome.OK:
        return GOOD
    return OUR if outcome in INFRASTRUCTURE_FAILURES else MODELS[list(Outcome).index(outcome) % len(MODELS)]
