"""Figures of a dry run: where the memory and the time of an update go.

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
    return _stacked(frame, ["part", "phase"], "Where the memory goes (dry run)", "GB per GPU")


def plot_time(rows: Rows) -> Figure:
    """Plot how long a micro-batch spends in each class of kernel and in collectives, for each stage and for SFT."""
    records = []
    for row in rows:
        seconds = dict(row["seconds"])
        if row["collectives"]:
            seconds["collectives (overlap with computation)"] = sum(one["seconds"] for one in row["collectives"])
        records += [{"part": row["dry_run"], "kernels": name, "seconds": value} for name, value in seconds.items()]
    title = "Where the time goes (dry run, all kernels at peak rates)"
    return _stacked(pd.DataFrame(records), ["part"], title, "seconds of a micro-batch<br>and the optimizer step")


def _stacked(frame: pd.DataFrame, axes: list[str], title: str, y_title: str) -> Figure:
    """Return bars over the columns `axes`, stacked by the next column. Their height is in the last column."""
    figure, (*_, names, values) = go.Figure(), frame.columns
    for colour, name in zip(COLOURS, dict.fromkeys(frame[names]), strict=False):
        shown = frame[frame[names] == name]
        x = [list(shown[axis]) for axis in axes]
        hover = f"{name}: %{{y:.3f}} {values}<extra></extra>"
        figure.add_bar(
            x=x if len(x) > 1 else x[0], y=shown[values], name=name, marker_color=colour, hovertemplate=hover
        )
    figure.update_layout(barmode="stack", title=title, yaxis_title=y_title)
    return Figure(figure, frame)
