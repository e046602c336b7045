"""Map of failure groups: one point per rollout, one disc per group."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from rstar_lab.analysis.failures import KEYS, failure_groups
from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.runs import named_rows
from rstar_lab.figure_theme import COLOURS
from rstar_lab.runs import RunStoreError
from rstar_lab.visible_text import escaped

_WIDTH = 590  # pixels of a row of discs; they fit into a notebook on a page of 900 pixels
_MAX_RADIUS = 95  # radius of the largest disc in pixels
_GAP, _LINE, _HEADING = 14, 14, 40  # pixels between discs, of a line of a label, above the discs of a band
_LABEL_WIDTH = 132  # pixels that a labelled disc has at least; _CHARACTERS fit in it
_CHARACTERS, _LABEL_LINES = 20, 3
_MIN_LABELLED = 0.01  # groups with a smaller share of the failures have their name on hover only
_GOLDEN_ANGLE = np.pi * (3 - np.sqrt(5))
_STATES = {"kept by RoC": COLOURS[0], "dropped": "#9aa3ad", "not recorded": COLOURS[4]}


def plot_failure_map(found: pd.DataFrame, by: Sequence[str] = KEYS, *, points: int = 3000) -> Figure:
    """Plot `failed_rollouts` as a map: each point is a rollout, each disc a group of `failure_groups(found, by)`.

    The first column of `by` selects the band of a group. The points that RoC kept are in the middle of their disc. Groups
    with less than 1% of the rollouts have no label; their names are shown on hover. A click on a point opens its rollout in a linked
    inspector, a box around points lists theirs.

    points: maximum number of points. With more rollouts, each group shows the same share of its rollouts, at least one.
    `Figure.frame` is the table of groups. Raises RunStoreError if nothing failed.
    """
    if found.empty:
        raise RunStoreError("no selected rollout failed or made an error")
    by = list(by)
    table = failure_groups(found, by)
    drawn_share = min(1.0, points / len(found))
    groups = {key: part for key, part in found.groupby(by, dropna=False)}
    scale = min(5.0, _MAX_RADIUS / float(np.sqrt(max(1.0, table.rollouts.max() * drawn_share))))  # pixels
    rows, notes, top = [], [], 0.0
    for band in failure_groups(found, by[:1]).to_dict("records"):
        in_band = table[table[by[0]] == band[by[0]]].to_dict("records")
        notes.append(_note(0, -top, f"<b>{escaped(_name([band[by[0]]]) or 'other')}</b>: {_numbers(band)}", "left", 13))
        top += _HEADING
        for row in _wrap([_Disc(group, by, groups, drawn_share, scale) for group in in_band]):
            radius = max(disc.radius for disc in row)
            left = 0.0
            for disc in row:
                centre = (left + disc.width / 2, -(top + radius))
                rows.append(disc.points.assign(x=centre[0] + disc.x, y=centre[1] + disc.y))
                if disc.label:
                    notes.append(_note(centre[0], centre[1] - disc.radius - 3, disc.label, "center", 11))
                left += disc.width + _GAP
            top += 2 * radius + _LINE * max(disc.lines for disc in row) + _GAP
    drawn = pd.concat(rows)
    figure = go.Figure()
    for state, part in drawn.groupby("state", sort=False):
        figure.add_scatter(
            x=part.x, y=part.y, mode="markers", name=state, text=part.hover, hovertemplate="%{text}<extra></extra>",
            customdata=["traj_id = '" + traj_id.replace("'", "''") + "'" for traj_id in part.traj_id],
            marker={"color": _STATES[str(state)], "size": max(3.0, 1.6 * scale), "line": {"width": 0}},
        )  # fmt: skip
    # Equal scales, so that discs stay round on a wide page.
    figure.update_xaxes(range=[-_GAP, _WIDTH + _GAP], visible=False, constrain="range", constraintoward="left")
    figure.update_yaxes(range=[-top, _GAP], visible=False, constrain="range", constraintoward="top", scaleanchor="x")
    of = "" if drawn_share == 1 else f"; {len(drawn):,} points are drawn"
    figure.update_layout(
        annotations=notes, height=int(top) + 100,
        title=f"{len(found):,} rollouts with failures in {len(table):,} groups{of}",
    )  # fmt: skip
    return Figure(figure, table)


class _Disc:
    """The points of a group around (0, 0), in pixels."""

    def __init__(
        self,
        group: dict[Any, Any],
        by: Sequence[str],
        groups: dict[Any, pd.DataFrame],
        drawn_share: float,
        scale: float,
    ) -> None:
        part = groups[tuple(group[name] for name in by)]
        part = part.sort_values("kept", ascending=False, kind="stable")  # kept rollouts first, missing values last
        count = max(1, round(len(part) * drawn_share))
        part = part.iloc[np.linspace(0, len(part) - 1, count).astype(int)]
        number = np.arange(count)  # phyllotaxis, Vogel (1979): points of equal density
        self.x, self.y = (np.sqrt(number) * scale * turn(number * _GOLDEN_ANGLE) for turn in (np.cos, np.sin))
        name = _name([group[column] for column in by[1:]]) or ("no failed call" if "message" in by else "other")
        state = np.where(part.kept.isna(), "not recorded", np.where(part.kept.eq(True), "kept by RoC", "dropped"))
        heading = "<br>".join(escaped(line) for line in textwrap.wrap(name, 60)) + f"<br>{_numbers(group)}"
        hover = [f"{heading}<br>{escaped(row.traj_id)}, step {row.step}" for row in named_rows(part)]
        self.points = pd.DataFrame({"traj_id": part.traj_id.to_numpy(), "state": state, "hover": hover})
        self.radius = scale * float(np.sqrt(count))
        shown = group["share"] >= _MIN_LABELLED
        lines = textwrap.wrap(name, _CHARACTERS, max_lines=_LABEL_LINES, placeholder="…") if shown else []
        self.label, self.lines = "<br>".join(escaped(line) for line in lines), len(lines)
        self.width = max(2 * self.radius, _LABEL_WIDTH if shown else 0)


def _wrap(discs: Sequence[_Disc]) -> list[list[_Disc]]:
    """Return the discs in rows of at most _WIDTH pixels."""
    rows: list[list[_Disc]] = []
    left = float("inf")
    for disc in discs:
        if left + disc.width > _WIDTH:
            rows.append([])
            left = 0.0
        rows[-1].append(disc)
        left += disc.width + _GAP
    return rows


def _note(x: float, y: float, text: str, align: str, size: int) -> dict[str, Any]:
    place = {"x": x, "y": y, "xanchor": align, "yanchor": "top", "align": align}
    return {**place, "text": text, "showarrow": False, "font": {"size": size}}


def _name(values: Sequence[Any]) -> str:
    return ": ".join(str(value) for value in values if not pd.isna(value) and value != "")


def _numbers(row: dict[Any, Any]) -> str:
    kept = "" if pd.isna(row["kept"]) else f", RoC kept {row['kept']:.0%}"
    problems = f"{row['problems']:,} problem" + "s" * (row["problems"] != 1)
    return f"{row['rollouts']:,} rollouts ({row['share']:.1%}), {problems}{kept}"
