"""Figures of lines: one panel per quantity, one line per group, with intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rstar_lab.analysis.figure_theme import line_styles, translucent
from rstar_lab.common.estimates import mean_interval
from rstar_lab.untrusted.text import Html, escaped

_MARKED = 60  # a line with more points has no markers


@dataclass(frozen=True)
class Panel:
    """A panel of `draw_panels`.

    points: one row per point: line (its name), x, value, and optionally low and high (95% interval), text (for the tooltip) and where
    (filter of the rollouts behind the point). percent: whether the values are shares.
    """

    title: str
    points: pd.DataFrame
    percent: bool = False


def wide_panel(title: str, x: pd.Series, series: Mapping[str, pd.Series], percent: bool = False) -> Panel:
    """Return a panel with one line per entry of `series`: name to values at `x`."""
    parts = [pd.DataFrame({"line": name, "x": x, "value": values}) for name, values in series.items()]
    return Panel(title, pd.concat(parts, ignore_index=True), percent)


def mean_panel(title: str, frame: pd.DataFrame, value: str, *, line: str, by: str, x: str) -> Panel:
    """Return a panel of a share: each point is the mean of the rows with equal `line` and `by`, with Student's 95% interval."""
    rows = [
        {"line": name, "x": part[x].mean()}
        | dict(zip(("value", "low", "high"), mean_interval(part[value].to_numpy(float))[:3], strict=True))
        for (name, _), part in frame.groupby([line, by])
    ]
    return Panel(title, pd.DataFrame(rows), percent=True)


def panel_place(number: int, columns: int = 2) -> dict[str, int]:
    """Return row and column of a panel, for plotly's functions."""
    return {"row": number // columns + 1, "col": number % columns + 1}


def draw_panels(
    panels: Sequence[Panel],
    *,
    x: str = "step",
    hover: str = "step %{x}: %{y:.3g}",
    order: Sequence[Any] | None = None,
    columns: int = 2,
) -> go.Figure:
    """Return a figure of panels, `columns` in a row. A line has the same style in all panels, and the legend names it once.

    Args:
        panels: At least one panel.
        x: Title of the x axes.
        hover: Tooltip of a point, after the name of its line.
        order: Names of the lines in the order of their styles. Default: that of the points.
        columns: Maximum number of panels in a row.
    """
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    titles = [escaped(panel.title) for panel in panels]
    figure = make_subplots(
        rows, columns, subplot_titles=titles, vertical_spacing=0.36 / rows, horizontal_spacing=0.2 / columns
    )
    styles = line_styles(order or list(dict.fromkeys(name for panel in panels for name in panel.points.line)))
    named = set[Any]()
    for number, panel in enumerate(panels):
        place = panel_place(number, columns)
        if panel.points["value"].isna().all():
            _mark_empty(figure, place)
            continue
        for name, points in panel.points.groupby("line", sort=False):
            if "low" in points and points.low.notna().any():
                band(figure, points.x, points.low, points.high, styles[name][0], 0.15, escaped(name), place)
            legend = len(styles) > 1 and name not in named
            _add_line(figure, points, escaped(name), styles[name], hover, legend, place)
            named.add(name)
        if panel.percent:
            figure.update_yaxes(tickformat=".0%", rangemode="tozero", **place)
        figure.update_xaxes(title_text=x if number >= len(panels) - columns else None, **place)
    figure.update_layout(height=120 + 260 * rows)
    return figure


def _add_line(
    figure: go.Figure, points: pd.DataFrame, name: Html, style: tuple[str, str, str], hover: str, legend: bool, place: dict
) -> None:  # fmt: skip
    colour, dash, symbol = style
    figure.add_scatter(
        x=points.x, y=points["value"], name=name, legendgroup=name, showlegend=legend,
        mode="lines+markers" if len(points) <= _MARKED else "lines", line={"color": colour, "dash": dash, "width": 2},
        marker={"symbol": symbol, "size": 6}, customdata=points.get("where"), text=points.get("text"),
        hovertemplate=f"{name}<br>{hover}<extra></extra>", **place,
    )  # fmt: skip


def band(
    figure: go.Figure, x: pd.Series, low: pd.Series, high: pd.Series, colour: str, opacity: float, group: str = "",
    place: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """Fill the area between `low` and `high`. Values without an interval are left out."""
    has_interval = (low.notna() & high.notna()).to_numpy()
    x, low, high = x[has_interval], low[has_interval], high[has_interval]
    figure.add_scatter(
        x=[*x, *x[::-1]], y=[*high, *low[::-1]], fill="toself", fillcolor=translucent(colour, opacity), line={"width": 0},
        mode="lines", hoverinfo="skip", showlegend=False, legendgroup=group, **(place or {}),
    )  # fmt: skip


def _mark_empty(figure: go.Figure, place: Mapping[str, int]) -> None:
    """Write that a panel has no values, instead of axes with arbitrary numbers."""
    figure.add_scatter(x=[None], y=[None], showlegend=False, **place)  # plotly.js has no axes without a trace
    figure.add_annotation(text="no values", showarrow=False, x=0.5, y=0.5, xref="x domain", yref="y domain", **place)
    figure.update_xaxes(visible=False, **place)
    figure.update_yaxes(visible=False, **place)
