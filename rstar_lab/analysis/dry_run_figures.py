"""Figures of a dry run: where the memory and the time of an update go, and which settings fit.

The rows are those of `rstar_lab.rl.preflight.dry_run.dry_run_rows`, or lines of `rstar-lab preflight RECIPE --profile P --dry-run
--json`. Times are bounds: every kernel at the peak rate of the GPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figure_theme import COLOURS

KINDS = ("parameters", "gradients", "moments", "activations", "logits", "buffers")
Rows = Sequence[Mapping[str, Any]]


def measured_updates(steps: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Return (largest memory in GB, median seconds of an update) of each stage whose updates ran on a GPU.

    steps: `Runs.trainer_metrics()` of one run.
    """
    if "update_gpu_gb" not in steps:
        return {}
    steps = steps[steps.update_gpu_gb > 0]
    seconds = (
        steps.reindex(columns=["update_actor_s", "update_s"]).bfill(axis=1).iloc[:, 0]
    )  # of verl, of the local trainer
    return {
        str(stage): (float(shown.update_gpu_gb.max()), float(seconds[shown.index].median()))
        for stage, shown in steps.groupby("stage", sort=False)
    }


def plot_memory(rows: Rows, steps: pd.DataFrame | None = None) -> Figure:
    """Plot the largest memory of each phase of an update, stacked by kind, for each stage and for SFT.

    steps: `Runs.trainer_metrics()` of a run of the recipe, to show what its updates needed on a GPU.
    """
    frame = pd.DataFrame(
        {"part": row["dry_run"], "phase": phase, "kind": kind, "gb": found["by_kind_gb"].get(kind, 0.0)}
        for row in rows
        for phase, found in row["phases"].items()
        for kind in KINDS
    )
    measured = {} if steps is None else measured_updates(steps)
    for part in dict.fromkeys(frame.part):
        if part in measured:
            frame.loc[len(frame)] = [part, "measured", "measured peak", measured[part][0]]
    figure = _stacked(frame, "kind", "phase", "gb", "%{y:.2f} GB")
    figure.update_layout(title="Where the memory goes (dry run)", yaxis_title="GB per GPU")
    return Figure(figure, frame)


def plot_time(rows: Rows, steps: pd.DataFrame | None = None) -> Figure:
    """Plot how long a micro-batch spends in each class of kernel and in collectives, for each stage and for SFT.

    steps: `Runs.trainer_metrics()` of a run of the recipe, to show the mean of its micro-batches on a GPU.
    """
    records = []
    measured = {} if steps is None else measured_updates(steps)
    for row in rows:
        seconds = dict(row["seconds"])
        exchange = sum(one["seconds"] for one in row["collectives"])
        if exchange:
            seconds["collectives (overlap with computation)"] = exchange
        part = row["dry_run"]
        records += [{"part": part, "kernels": name, "seconds": value} for name, value in seconds.items()]
        if part in measured:
            a_batch = measured[part][1] / row["micro_batches"]
            records.append({"part": f"{part}, measured", "kernels": "measured", "seconds": a_batch})
    frame = pd.DataFrame(records)
    figure = _stacked(frame, "kernels", None, "seconds", "%{y:.3f} s")
    figure.update_layout(
        title="Where the time goes (dry run, all kernels at peak rates)",
        yaxis_title="seconds of a micro-batch<br>and the optimizer step",
    )
    return Figure(figure, frame)


def plot_sweep(rows: Rows) -> Figure:
    """Plot the memory with its margin against the time of an update, for each combination of a sweep."""
    found = [row for row in rows if "sweep" in row]
    best = next((row["recommended"] for row in rows if "recommended" in row), None)
    frame = pd.DataFrame(
        {
            **row["sweep"], "with_margin_gb": row["with_margin_gb"], "update_s": row["update_s"], "mfu_bound": row["mfu_bound"],
            "fits": row["fits"], "recommended": row["sweep"] == best,
        }
        for row in found
    )  # fmt: skip
    frame["label"] = [", ".join(f"{key} {value}" for key, value in row["sweep"].items()) for row in found]
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


def _stacked(frame: pd.DataFrame, names: str, inner: str | None, values: str, hover: str) -> go.Figure:
    """Return bars stacked by the column `names`, for each part and, within it, each value of the column `inner`."""
    figure = go.Figure()
    for colour, name in zip(COLOURS, dict.fromkeys(frame[names]), strict=False):
        shown = frame[frame[names] == name]
        x = shown.part if inner is None else [list(shown.part), list(shown[inner])]
        figure.add_bar(
            x=x, y=shown[values], name=name, marker_color=colour, hovertemplate=f"{name}: {hover}<extra></extra>"
        )
    figure.update_layout(barmode="stack")
    return figure
