"""Where the time goes: the timeline of the rollouts of a step, and staleness and idle time over the steps of a run."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figure_theme import COLOURS
from rstar_lab.analysis.filters import sql_list, sql_literal
from rstar_lab.analysis.line_panels import draw_panels, wide_panel
from rstar_lab.analysis.runs import Runs, RunsLike, as_runs, named_rows
from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunStoreError
from rstar_lab.runs.errors import NotStored
from rstar_lab.runs.messages import read_messages
from rstar_lab.untrusted.text import counted, escaped

KINDS: dict[str, dict[str, Any]] = {  # marker of each kind of segment
    "generate": {"color": COLOURS[0]},
    "queue": {"color": COLOURS[4], "pattern": {"shape": "/"}},
    "tool": {"color": COLOURS[2]},
    "wait": {"color": "rgba(127, 127, 127, 0.3)"},
}
_COLUMNS = ["traj_id", "lane", "kind", "turn", "start_s", "seconds"]


def plot_timeline(runs: RunsLike, run_id: str, step: int, *, lanes: int = 100) -> Figure:
    """Plot one lane per rollout of a step with segments for generate, queue, tool and wait, and mark the last rollout to end.

    generate: requests to the engine, including the time they queue there. queue: a call waits for a sandbox worker. tool:
    calls run, or the environment answers. wait: the rollout is complete, others of the step are not. The legend has the
    sums in rollout-seconds, the title the idle share: wait / (rollouts x seconds of the longest rollout).

    The run store has durations and no start times, so all rollouts start at 0. If a step has more rollouts than run at
    a time, or is generated asynchronously (`rl.schedule.type`), they start at different times and do not wait for each other.
    The segments of a turn come from `generate_s` in the messages and from the calls. Calls of a turn are drawn as one; the
    rest of the rollout's `tool_s` is divided evenly over its turns. Without messages, a rollout has one segment per kind.

    lanes: maximum number of lanes: rollouts spaced evenly by duration, including the longest; the sums cover all
    rollouts.
    `Figure.frame`: one row per segment: traj_id, lane (0: shortest), kind, turn (0: first; -1: not of a turn), start_s,
    seconds. A click on a segment opens its rollout in a linked inspector.
    Raises RunStoreError if the step has no measured times, and ValueError if lanes is not positive.
    """
    runs = as_runs(runs)
    if lanes < 1:
        raise ValueError(f"lanes must be at least 1, got {lanes}")
    rows = runs.trajectories(
        {"run_id": run_id, "step": int(step)}, columns=["traj_id", "generate_s", "tool_s", "queue_s", "turns"]
    )
    if rows.empty:
        raise RunStoreError(f"run {run_id} has no rollouts at step {step}")
    rows = rows.dropna(subset=["generate_s", "tool_s"])
    if not (rows.generate_s + rows.tool_s).max() > 0:  # also without rows
        raise RunStoreError(f"run {run_id} has no measured times at step {step}")
    rows["queue_s"] = np.minimum(rows.queue_s.fillna(0), rows.tool_s)
    rows["seconds"] = rows.generate_s + rows.tool_s
    rows = rows.sort_values(["seconds", "traj_id"], ignore_index=True)
    drawn = rows.iloc[np.unique(np.linspace(len(rows) - 1, 0, min(lanes, len(rows))).round().astype(int))]
    turns = _turns(runs, run_id, int(step), list(drawn.traj_id))
    frame = _segments(drawn, turns, rows.seconds.max())
    return Figure(_draw(frame, rows, run_id, step), frame)


def _turns(runs: Runs, run_id: str, step: int, traj_ids: list[str]) -> dict[str, list[list[float]]]:
    """Return [generate_s, queue_s, tool_s (including queue_s)] of each turn, of the rollouts whose messages have times."""
    condition = f"run_id = {sql_literal(run_id)} AND step = {step} AND traj_id IN ({sql_list(traj_ids)})"
    try:
        stored = runs.sql(f"SELECT traj_id, messages FROM transcripts WHERE {condition}")
    except NotStored:
        return {}
    turns: dict[str, list[list[float]]] = {}
    for row in named_rows(stored):
        spoken = [m.get("generate_s") for m in read_messages(row.messages or "[]") if m["role"] == "assistant"]
        if spoken and None not in spoken:
            turns[row.traj_id] = [[seconds or 0.0, 0.0, 0.0] for seconds in spoken]
    try:
        calls = runs.sql(
            f"""SELECT traj_id, turn, max(queue_s) AS queue_s, max(coalesce(queue_s, 0) + coalesce(run_s, 0)) AS tool_s
                FROM calls WHERE {condition} GROUP BY ALL"""
        ).fillna(0.0)
    except NotStored:
        return turns
    for row in named_rows(calls):
        if row.turn < len(own := turns.get(row.traj_id, [])):
            own[int(row.turn)][1:] = row.queue_s, row.tool_s
    return turns


def _segments(drawn: pd.DataFrame, turns: dict[str, list[list[float]]], longest_s: float) -> pd.DataFrame:
    segments: list[tuple[Any, ...]] = []
    for lane, rollout in enumerate(named_rows(drawn)):
        whole = [[rollout.generate_s, rollout.queue_s, rollout.tool_s]]
        parts = turns.get(rollout.traj_id, whole)
        rest_s = max(0.0, rollout.tool_s - sum(tool_s for *_, tool_s in parts)) / len(parts)
        now = 0.0
        for turn, (generate_s, queue_s, tool_s) in enumerate(parts):
            spent = {"generate": generate_s, "queue": queue_s, "tool": tool_s - queue_s + rest_s}
            for kind, seconds in spent.items():
                if seconds > 0:
                    segments.append((rollout.traj_id, lane, kind, -1 if parts is whole else turn, now, seconds))
                    now += seconds
        if longest_s > now:
            segments.append((rollout.traj_id, lane, "wait", -1, now, longest_s - now))
    return pd.DataFrame(segments, columns=_COLUMNS)


def _draw(frame: pd.DataFrame, rows: pd.DataFrame, run_id: str, step: int) -> go.Figure:
    longest_s = rows.seconds.iloc[-1]
    wait_s = float((longest_s - rows.seconds).sum())
    sums = {
        "generate": rows.generate_s.sum(), "queue": rows.queue_s.sum(), "tool": (rows.tool_s - rows.queue_s).sum(), "wait": wait_s,
    }  # fmt: skip
    figure = go.Figure()
    for kind, marker in KINDS.items():
        part = frame[frame.kind == kind]
        texts = []
        for row in named_rows(part):
            turn = f", turn {row.turn + 1}" if row.turn >= 0 else ""
            texts.append(f"{escaped(row.traj_id)}{turn}<br>{kind} {row.seconds:.3g} s from {row.start_s:.3g} s")
        figure.add_bar(
            x=part.seconds, y=part.lane, base=part.start_s, orientation="h", name=f"{kind} {sums[kind]:,.3g} s",
            marker=marker | {"line": {"width": 0}}, customdata=[{"traj_id": traj_id} for traj_id in part.traj_id],
            text=texts, textposition="none", hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
    last = rows.traj_id.iloc[-1]
    figure.add_scatter(
        x=[longest_s], y=[frame.lane.max()], mode="markers", name="last rollout", customdata=[{"traj_id": last}], text=[escaped(last)],
        marker={"symbol": "star", "size": 13, "color": COLOURS[1], "line": {"color": "white", "width": 1}},
        hovertemplate="%{text}<br>ends last, at %{x:.3g} s<extra></extra>",
    )  # fmt: skip
    shown = frame.lane.max() + 1
    of = counted(len(rows), "rollout") if shown == len(rows) else f"{shown:,} of {len(rows):,} rollouts"
    idle = wait_s / (len(rows) * longest_s) if longest_s else 0.0
    layout = {"barmode": "overlay", "bargap": 0.15, "height": min(760, 240 + 9 * int(shown))}
    figure.update_layout(layout, title=f"step {step}, {of}; idle {idle:.0%}")
    figure.update_xaxes(title="seconds", rangemode="tozero")
    figure.update_yaxes(title="rollouts by duration", showticklabels=False, ticks="", showgrid=False)
    return figure


def plot_staleness(runs: RunsLike, run_id: str) -> Figure:
    """Plot, by step: staleness of the groups trained on, idle shares of generator and trainer, and dropped groups.

    The third panel shows which groups the staleness limit affects: the share of groups dropped as too old, among all
    groups, the longest third and the least solved third. Raises UserError for a run in
    mode sync.
    """
    runs = as_runs(runs)
    steps = runs.steps({"run_id": run_id})
    if "staleness_mean" not in steps:
        raise UserError(f"run {run_id} has no staleness: it was trained in mode sync")
    idle = {"trainer": steps["generate_s" if "generate_s" in steps else "gen_s"] / steps.step_s}  # gen_s: verl's name
    if "engine_busy_s" in steps:
        idle = {"generator": 1 - steps.engine_busy_s / steps.step_s} | idle
    dropped = {
        "all groups": steps.dropped_share, "longest third": steps.dropped_share_long, "least solved third": steps.dropped_share_hard,
    }  # fmt: skip
    panels = [
        wide_panel("staleness (updates)", steps.step, {"mean": steps.staleness_mean, "maximum": steps.staleness_max}),
        wide_panel("idle share", steps.step, idle, percent=True),
        wide_panel("dropped as too old (share of groups)", steps.step, dropped, percent=True),
    ]
    figure = draw_panels(panels, columns=3)
    return Figure(figure, steps)
