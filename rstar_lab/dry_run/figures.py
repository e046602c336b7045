"""Figures of a dry run: where the memory and the time of an update go, and which settings fit.

The rows are those of `dry_run_rows`, or lines of `rstar-lab preflight RECIPE --profile P --dry-run --json`. Times are bounds:
every kernel at the peak rate of the GPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figure_theme import COLOURS
from rstar_lab.dry_run.meter import KINDS

Rows = Sequence[Mapping[str, Any]]


def plot_memory(rows: Rows) -> Figure:
    """Plot the largest memory of each phase of an update, stacked by kind, for each stage and for SFT."""
    frame = pd.DataFrame(
        {"part": row["dry_run"], "phase": phase, "kind": kind, "gb": found["by_kind_gb"].get(kind, 0.0)}
        for row in rows
        for phase, found in row["phases"].items()
        for kind in KINDS
    )
    layout = {"title": "Where the memory goes (dry run)", "yaxis_title": "GB per GPU"}
    return _stacked(frame, "kind", ["part", "phase"], "gb", "%{y:.2f} GB", layout)


def plot_time(rows: Rows) -> Figure:
    """Plot how long a micro-batch spends in each class of kernel and in collectives, for each stage and for SFT."""
    records = []
    for row in rows:
        seconds = dict(row["seconds"])
        if row["collectives"]:
            seconds["collectives (overlap with computation)"] = sum(one["seconds"] for one in row["collectives"])
        records += [{"part": row["dry_run"], "kernels": name, "seconds": value} for name, value in seconds.items()]
    layout = {
        "title": "Where the time goes (dry run, all kernels at peak rates)",
        "yaxis_title": "seconds of a micro-batch<br>and the optimizer step",
    }
    return _stacked(pd.DataFrame(records), "kernels", ["part"], "seconds", "%{y:.3f} s", layout)


def plot_sweep(rows: Rows) -> Figure:
    """Plot the memory with its margin against the time of an update, for each combination of a sweep."""
    best = next((row["recommended"] for row in rows if "recommended" in row), None)
    frame = pd.DataFrame([row for row in rows if "sweep" in row])
    frame["label"] = [", ".join(f"{key} {value}" for key, value in values.items()) for values in frame.sweep]
    frame["recommended"] = [values == best for values in frame.sweep]
    figure = go.Figure()
    groups = (
        ("recommended", frame.recommended, COLOURS[2], "star", 16),
        ("fits", frame.fits & ~frame.recommended, COLOURS[0], "circle", 10),
        ("does not fit", ~frame.fits, COLOURS[1], "x", 10),
    )
    for name, chosen, colour, symbol, size in groups:
        shown = frame[chosen]
        figure.add_scatter(
            x=shown.with_margin_gb,
            y=shown.update_s,
            mode="markers",
            name=name,
            marker={"color": colour, "symbol": symbol, "size": size},
            customdata=shown[["label", "mfu_bound"]],
            hovertemplate="%{customdata[0]}<br>%{x:.1f} GB, update %{y:.1f} s, MFU %{customdata[1]:.0%}<extra></extra>",
        )
    figure.update_layout(
        title="What fits and how fast (dry run)",
        xaxis_title="GB per GPU, with margin",
        yaxis_title="update, at least (s)",
        yaxis_rangemode="tozero",
        showlegend=True,
    )
    return Figure(figure, frame)


def _stacked(
    frame: pd.DataFrame, names: str, axes: list[str], values: str, hover: str, layout: dict[str, str]
) -> Figure:
    """Return bars stacked by the column `names`, over the columns `axes`."""
    figure = go.Figure()
    for colour, name in zip(COLOURS, dict.fromkeys(frame[names]), strict=False):
        shown = frame[frame[names] == name]
        x = [list(shown[axis]) for axis in axes]
        figure.add_bar(
            x=x if len(x) > 1 else x[0],
            y=shown[values],
            name=name,
            marker_color=colour,
            hovertemplate=f"{name}: {hover}<extra></extra>",
        )
    figure.update_layout(barmode="stack", **layout)
    return Figure(figure, frame)
