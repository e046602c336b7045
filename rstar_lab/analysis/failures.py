"""Failure groups: rollouts that failed, or were correct after a failed call, grouped by what went wrong, without a judge model.

A group is a kind (how the rollout ended), the outcome of its last failed call, and the message of that failure with names and
numbers replaced.
"""

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rstar_lab.analysis.code_use import rollouts
from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figure_theme import COLOURS
from rstar_lab.analysis.filters import Where
from rstar_lab.analysis.runs import RunsLike, as_runs
from rstar_lab.runs import RunStoreError
from rstar_lab.untrusted.text import escaped

KEYS = ["kind", "outcome", "message"]
_QUOTED = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|`[^`\n]*`")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")
_MESSAGE = 40  # maximum characters of a message beside a bar
_MOST_IDS = 500  # maximum number of rollouts that a click on a bar lists


def failed_rollouts(runs: RunsLike, where: Where = None, *, limit: int | None = None) -> pd.DataFrame:
    """Return one row per rollout of a kind: run_id, step, traj_id, problem_id, reward, kept, kind, outcome, message.

    kind: the first that applies: environment error (the environment or an engine failed), truncated (by a limit), no answer, wrong
    answer (not rewarded), correct after errors (rewarded, after at least one failed call); other rollouts have no row. outcome,
    message: those of the last failed call, empty if no call failed.
    limit: maximum number of rollouts to read, a fixed sample; default: all.
    """
    rows, columns = [], ["run_id", "step", "traj_id", "problem_id", "reward", "kept"]
    for rollout in rollouts(as_runs(runs), where, limit, parse=False):
        failed = [call for call in rollout["calls"] if call["outcome"] not in (None, "ok")]
        kind = _kind(rollout, bool(failed))
        if kind is None:
            continue
        last = failed[-1] if failed else {"outcome": "", "response": ""}
        rows.append([*map(rollout.get, columns), kind, last["outcome"], normalised(last["response"])])
    return pd.DataFrame(rows, columns=[*columns, *KEYS])


def failure_groups(found: pd.DataFrame) -> pd.DataFrame:
    """Return the groups of `failed_rollouts`, the largest first: KEYS, rollouts, share (of all failures), problems, kept
    (share that RoC kept), first_step, last_step, example (traj_id)."""
    groups = found.groupby(KEYS, dropna=False)
    table = groups.agg(
        rollouts=("traj_id", "size"), problems=("problem_id", "nunique"), kept=("kept", "mean"),
        first_step=("step", "min"), last_step=("step", "max"), example=("traj_id", "first"),
    ).reset_index()  # fmt: skip
    table.insert(len(KEYS) + 1, "share", table.rollouts / max(1, len(found)))
    return table.sort_values("rollouts", ascending=False, kind="stable", ignore_index=True)


def plot_failures(found: pd.DataFrame, groups: int = 10) -> Figure:
    """Plot the largest groups of `failed_rollouts`: rollouts kept and dropped by RoC, and each group over the steps.

    A click on a bar or point opens its rollouts in a linked inspector. Raises RunStoreError if nothing failed.
    """
    if found.empty:
        raise RunStoreError("no selected rollout failed or made an error")
    table = failure_groups(found).head(groups)
    values = table[KEYS].to_numpy().tolist()
    names = [escaped(_group_name(each)) for each in values]
    of_group = [found[(found[KEYS] == each).all(axis=1)] for each in values]
    figure = make_subplots(1, 2, horizontal_spacing=0.08, subplot_titles=("rollouts", "by step"))
    selected = {"kept by RoC": (True, COLOURS[0]), "dropped": (False, "#9aa3ad"), "no selection": (None, COLOURS[4])}
    for label, (kept, colour) in selected.items():
        parts = [group[group.kept.isna() if kept is None else group.kept.eq(kept)] for group in of_group]
        if kept is not None or any(map(len, parts)):
            figure.add_bar(
                y=names, x=[len(part) for part in parts], orientation="h", name=label, marker_color=colour,
                customdata=[rollouts_filter(part) for part in parts], hovertemplate="%{y}<br>%{x} rollouts<extra></extra>",
                row=1, col=1,
            )  # fmt: skip
    for number, (name, group) in enumerate(zip(names, of_group, strict=True)):
        steps = group.groupby("step")
        figure.add_scatter(
            x=list(steps.groups), y=steps.size(), mode="lines+markers", name=name, showlegend=False,
            line_color=COLOURS[number % len(COLOURS)], customdata=[rollouts_filter(part) for _, part in steps],
            hovertemplate=f"{name}<br>step %{{x}}: %{{y}}<extra></extra>", row=1, col=2,
        )  # fmt: skip
    figure.update_layout(barmode="stack", height=160 + 34 * len(names))
    short = [
        (_group_name(each[:2]), each[2] if len(each[2]) <= _MESSAGE else f"{each[2][: _MESSAGE - 1]}…")
        for each in values
    ]
    labels = ["<br>".join(escaped(line) for line in lines if line) for lines in short]
    figure.update_yaxes(autorange="reversed", tickvals=names, ticktext=labels, tickfont={"size": 12}, row=1, col=1)
    figure.update_xaxes(title_text="step", row=1, col=2)
    return Figure(go.Figure(figure), table)


def _group_name(values: Sequence[Any]) -> str:
    return ": ".join(str(value) for value in values if not pd.isna(value) and value != "")


def normalised(text: str) -> str:
    """Return the last line of an error with quoted text and numbers replaced, at most 120 characters."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b", line)]
    line = (errors or lines or [""])[-1]
    return _NUMBER.sub("N", _QUOTED.sub("'…'", line))[:120]


def _kind(rollout: dict[str, Any], has_errors: bool) -> str | None:
    if rollout["stop_reason"] in ("environment_error", "engine_error", "undecided"):
        return "environment error"
    if rollout["reward"] is not None and rollout["reward"] > 0:
        return "correct after errors" if has_errors else None
    if rollout["truncated"]:
        return "truncated"
    if rollout["reward"] is None:  # neither right nor wrong
        return None
    return "wrong answer" if rollout["answer"] is not None else "no answer"


def rollouts_filter(part: pd.DataFrame) -> dict[str, Any]:
    """Return a filter that selects these rollouts, at most _MOST_IDS of them."""
    return {"traj_id": list(part.traj_id.head(_MOST_IDS))}
