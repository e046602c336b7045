"""Figures and a table of simulated steps under several dispatch policies."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.simulator import SimulationResult
from rstar_lab.analysis.figure_theme import COLOURS, apply_theme


def table(results: Mapping[str, SimulationResult], bound_s: float) -> pd.DataFrame:
    """Return one row per policy: makespan in seconds, lower bound / makespan, share of idle engine time, preemptions, computed
    prompt tokens, share of prompt tokens found in the prefix cache, and turns that moved to another engine.

    bound_s: lower bound of the makespan, in seconds.
    """
    rows = [
        {
            "policy": name,
            "makespan_s": result.makespan_s,
            "bound / makespan": bound_s / result.makespan_s,
            "idle share": result.idle_share,
            "preemptions": result.preemptions,
            "prompt tokens computed": result.computed,
            "found in cache": result.hit / max(result.hit + result.computed, 1),
            "turns that moved": result.moved,
        }
        for name, result in results.items()
    ]
    return pd.DataFrame(rows).set_index("policy").sort_values("makespan_s")


def plot_gantt(
    results: Mapping[str, SimulationResult], bound_s: float, points: int = 400, *, mode: str = "light"
) -> go.Figure:
    """Plot the number of generating rollouts per engine (row) over time (seconds), one panel per policy.

    An idle engine is blank.

    bound_s: lower bound of the makespan, in seconds. points: number of points in time. mode: "light" or "dark" page.
    """
    figure = make_subplots(
        len(results), 1, shared_xaxes=True, vertical_spacing=0.25 / len(results), subplot_titles=list(results)
    )
    times = np.linspace(0, max(result.makespan_s for result in results.values()), points)
    engines = len(next(iter(results.values())).busy_s)
    batches = {}
    for name, result in results.items():
        batch = np.zeros((engines, points))
        for engine in range(engines):
            started = np.sort([span.started for span in result.spans if span.engine == engine])
            ended = np.sort([span.ended for span in result.spans if span.engine == engine])
            batch[engine] = np.searchsorted(started, times, "right") - np.searchsorted(ended, times, "right")
        batches[name] = np.where(batch > 0, batch, np.nan)
    largest = max(np.nanmax(batch) for batch in batches.values())
    for row, (name, batch) in enumerate(batches.items(), start=1):
        figure.add_heatmap(
            x=times,
            z=batch,
            y=[f"engine {i}" for i in range(engines)],
            zmin=0,
            zmax=largest,
            colorscale="Viridis",
            showscale=row == 1,
            colorbar={"title": "rollouts"},
            hovertemplate="%{y}, %{x:.0f} s: %{z} rollouts<extra></extra>",
            row=row,
            col=1,
        )
        figure.add_vline(x=results[name].makespan_s, line_color=COLOURS[1], row=row, col=1)
        figure.add_vline(x=bound_s, line_dash="dot", row=row, col=1)
    figure.update_xaxes(title_text="seconds (line: makespan, dotted: lower bound)", row=len(results), col=1)
    figure.update_yaxes(showticklabels=False)
    figure.update_layout(height=110 * len(results) + 120)
    apply_theme(figure, mode)
    return figure


def plot_turns(result: SimulationResult, engine: int, *, mode: str = "light") -> go.Figure:
    """Plot the turns of one engine, one row per rollout in order of arrival: time in the queue, then generation.

    engine: its index. mode: "light" or "dark" page.
    """
    spans = sorted((span for span in result.spans if span.engine == engine), key=lambda span: span.sent)
    row_of = {rollout: row for row, rollout in enumerate(dict.fromkeys(span.rollout for span in spans))}
    figure = go.Figure()
    for name, colour, begin, end in (
        ("in the engine's queue", COLOURS[4], "sent", "started"),
        ("generating", COLOURS[0], "started", "ended"),
    ):
        x: list[float | None] = []
        y: list[int | None] = []
        for span in spans:
            x += [getattr(span, begin), getattr(span, end), None]
            y += [row_of[span.rollout], row_of[span.rollout], None]
        figure.add_scattergl(x=x, y=y, mode="lines", name=name, line={"color": colour, "width": 3})
    figure.update_layout(
        height=420, xaxis_title="seconds (gaps: the rollout waits for its tools)", yaxis_title="rollout"
    )
    apply_theme(figure, mode)
    return figure
