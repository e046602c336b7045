"""Map of failure groups: one rectangle per group, as large as its share of the failures."""

import textwrap
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from rstar_lab.analysis.failures import KEYS, failure_groups, rollouts_condition
from rstar_lab.analysis.figure import Figure
from rstar_lab.figure_theme import COLOURS
from rstar_lab.runs import RunStoreError
from rstar_lab.visible_text import escaped

_NOT_SELECTED = "#9aa3ad"  # colour of a group of which RoC kept nothing, or whose selection is not recorded


def plot_failure_map(found: pd.DataFrame, by: Sequence[str] = KEYS) -> Figure:
    """Plot `failed_rollouts` as a treemap of the groups of `failure_groups(found, by)`.

    The first column of `by` selects the block of a group. The stronger the colour of a group, the more of its rollouts RoC
    kept. A click on a group lists its rollouts in a linked inspector.

    `Figure.frame` is the table of groups. Raises RunStoreError if nothing failed.
    """
    if found.empty:
        raise RunStoreError("no selected rollout failed or made an error")
    by = list(by)
    table = failure_groups(found, by)
    rows: list[dict[str, Any]] = []
    for level in (by[:1], by) if len(by) > 1 else (by,):
        parts = {repr(key): part for key, part in found.groupby(level, dropna=False)}
        for group in failure_groups(found, level).to_dict("records"):
            values = tuple(group[name] for name in level)
            top = len(level) == 1
            name = _name(values if top else values[1:]) or ("other" if top or "message" not in by else "no failed call")
            lines = "<br>".join(map(escaped, textwrap.wrap(name, 60, max_lines=4, placeholder="…")))
            rows.append(
                {
                    "id": repr(values),
                    "parent": "" if top else repr(values[:1]),
                    "label": lines,
                    "rollouts": group["rollouts"],
                    "numbers": _numbers(group),
                    "where": rollouts_condition(parts[repr(values)]),
                    "kept": 0.0 if pd.isna(group["kept"]) else float(group["kept"]),
                }
            )
    drawn = pd.DataFrame(rows)
    figure = go.Figure(
        go.Treemap(
            ids=drawn.id, parents=drawn.parent, labels=drawn.label, values=drawn.rollouts, branchvalues="total",
            text=drawn.numbers, customdata=list(drawn["where"]), textinfo="label+text",
            hovertemplate="%{label}<br>%{text}<extra></extra>", pathbar={"visible": False},
            marker={"colors": drawn.kept, "colorscale": [[0, _NOT_SELECTED], [1, COLOURS[0]]], "cmin": 0, "cmax": 1},
        )
    )  # fmt: skip
    figure.update_layout(
        height=480, margin={"t": 60, "l": 10, "r": 10, "b": 10},
        title=f"{len(found):,} rollouts with failures in {len(table):,} groups",
    )  # fmt: skip
    return Figure(figure, table)


def _name(values: Sequence[Any]) -> str:
    return ": ".join(str(value) for value in values if not pd.isna(value) and value != "")


def _numbers(row: dict[Any, Any]) -> str:
    kept = "" if pd.isna(row["kept"]) else f", RoC kept {row['kept']:.0%}"
    problems = f"{row['problems']:,} problem" + "s" * (row["problems"] != 1)
    return f"{row['rollouts']:,} rollouts ({row['share']:.1%}), {problems}{kept}"
