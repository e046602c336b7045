"""Figures linked to an inspector: a click or a box selection lists the rollouts behind the points."""

import copy
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import pandas as pd
import plotly.graph_objects as go
import traitlets
from plotly.offline import get_plotlyjs

from rstar_lab.analysis.figure_image import figure_image
from rstar_lab.analysis.figure_theme import apply_theme, template
from rstar_lab.analysis.filters import Where
from rstar_lab.analysis.inspector.palette import join_modules
from rstar_lab.analysis.inspector.widget import Bundle, NotebookWidget
from rstar_lab.analysis.tables import html_table
from rstar_lab.runs import RunStoreError
from rstar_lab.untrusted.text import Html, counted, html

_MAX_LABELS = 3  # maximum number of points named in the label of a selection
Point = int | tuple[int, ...]  # index of a point, or row and column of a cell of a heat map
MAX_ROWS = 20  # rows in the table
WIDTH = 900  # pixels of the image
_LOG = logging.getLogger(__name__)


class RolloutList(Protocol):
    """What figures need from an inspector. A protocol, because the inspector itself draws figures (of forks)."""

    source: Any

    def where_sql(self, where: Where) -> str: ...

    def show(self, label: str = "", **filters: Any) -> None: ...

    def show_and_reveal(self, label: str, **filters: Any) -> None: ...


def data_table(frame: pd.DataFrame) -> Html:
    """Return the first rows of the data as an HTML table."""
    rows = f", rows 1 to {MAX_ROWS} of {len(frame)}" if len(frame) > MAX_ROWS else ""
    table = html_table(frame.drop(columns="where", errors="ignore").head(MAX_ROWS))
    return html("<p>Data of the figure{} (no browser was available to draw it):</p>{}", rows, table)


def svg(figure: go.Figure) -> str | None:
    """Render a figure with a local Chromium or Chrome. Returns None if no browser is installed.

    Returns None in a notebook server too, because the page draws the figure itself.
    """
    if "JPY_SESSION_NAME" in os.environ:
        return None
    try:
        return figure_image(figure, "svg", WIDTH, figure.layout.height or 450).decode()
    except RunStoreError as error:  # a broken browser must not hide the data
        _LOG.info("%s; showing a table instead", error)
        return None


class LinkedFigure(NotebookWidget):
    """Widget of a plotly figure whose points open rollouts in an inspector.

    The trace says which rollouts are behind a point:
    - `customdata[i]` is an SQL condition on trajectories (as in the figures of `rstar_lab.analysis`) or a dict of the
      inspector's filters.
    - `meta`, if it is a dict, may hold {"filter": filters of the whole trace, "x": column of x, "y": column of y}.
    - Otherwise x is the step, and the trace's name is the run id if a run has that name. A trace that shows no values on
      hover (a confidence band) selects nothing.

    The page loads plotly once from the kernel, without network access. Data of `figure.frame`, if it is a data frame, is
    shown as a table where figures cannot be drawn.
    """

    _esm = join_modules("dom", "plot", "figure")
    _css = ".rl-figure { width: 100%; min-height: 120px; }"

    figure_json = traitlets.Unicode("{}").tag(sync=True)
    linked = traitlets.Bool(False).tag(sync=True)
    dark_template = traitlets.Dict(template("dark").to_plotly_json()).tag(sync=True)

    def __init__(self, figure: go.Figure, inspector: RolloutList | None, **state: Any) -> None:
        self.inspector = inspector
        self.figure = figure = themed(figure)
        super().__init__(**{"figure_json": figure.to_json(), "linked": inspector is not None, **state})
        self.on_msg(self._on_points)

    def update_figure(self, figure: go.Figure) -> None:
        """Replace the figure that is shown."""
        self.figure = themed(figure)
        self.figure_json = self.figure.to_json()

    def static_bundle(self) -> Bundle:
        """Return what notebooks show without a kernel: plotly's JSON (drawn by JupyterLab), an SVG image (shown by GitHub and nbconvert)
        and plain text. Without a local Chromium or Chrome, a table of the data replaces the image."""
        found = getattr(self.figure, "frame", None)
        frame = found if isinstance(found, pd.DataFrame) else None
        text = repr(self.figure if frame is None else frame)
        bundle: Bundle = {"application/vnd.plotly.v1+json": json.loads(self.figure.to_json()), "text/plain": text}
        if (image := svg(self.figure)) is not None:
            bundle["image/svg+xml"] = image
        elif frame is not None:
            bundle["text/html"] = data_table(frame)
        return bundle

    def replacement(self) -> "LinkedFigure":
        widget = LinkedFigure(self.figure, self.inspector)
        traitlets.dlink((self, "figure_json"), (widget, "figure_json"))
        return widget

    def _on_points(self, _widget: Any, message: Any, _buffers: Any) -> None:
        answer_figure(self, message, [self.figure], self.inspector)


def answer_figure(
    widget: NotebookWidget, message: Any, figures: Sequence[go.Figure], inspector: RolloutList | None
) -> bool:
    """Answer a message of figures in the browser: plotly's script, or the rollouts behind points. Returns whether it was one."""
    op = message.get("op") if isinstance(message, dict) else None
    if op == "plotly":
        widget.send({"id": message["id"], "result": True}, [get_plotlyjs().encode()])
    elif op == "points" and inspector is not None:
        # plotly reports a number, or row and column.
        points = [(int(trace), tuple(map(int, p)) if isinstance(p, list) else int(p)) for trace, p in message["points"]]
        show_points(inspector, figures[int(message.get("figure", 0))], points)
    return op in ("plotly", "points")


def themed(figure: go.Figure) -> go.Figure:
    """Return a copy in the project's theme, or the figure itself if it has data and therefore the theme already."""
    if isinstance(getattr(figure, "frame", None), pd.DataFrame):
        return figure
    themed = go.Figure(figure)
    apply_theme(themed)
    return themed


def link(figure: go.Figure, inspector: RolloutList) -> LinkedFigure:
    """Link a figure to an inspector and return the widget to display. Raises UserError if a trace names an unknown filter."""
    check_links(inspector, figure)
    return LinkedFigure(figure, inspector)


def check_links(inspector: RolloutList, figure: go.Figure) -> None:
    """Raise UserError if a trace names an unknown filter."""
    for trace in figure.data:
        for filters in _distinct(point_filter(inspector, trace, point) for point in _points(trace)):
            inspector.where_sql(filters)


def show_points(inspector: RolloutList, figure: go.Figure, points: Sequence[tuple[int, Point]]) -> None:
    """List the rollouts of these (trace, point) pairs, or all rollouts if there are no points.

    A point is an index, or (row, column) in a heat map.
    """
    if not points:
        inspector.show()
        return
    filters = _distinct(
        filters for trace, point in points if (filters := point_filter(inspector, figure.data[trace], point))
    )
    label = "; ".join(_describe(each) for each in filters[:_MAX_LABELS])
    if len(filters) > _MAX_LABELS:
        label += f"; and {len(filters) - _MAX_LABELS} more points"
    if len(filters) == 1:
        inspector.show_and_reveal(label, **filters[0])
    elif filters:
        inspector.show_and_reveal(label, any=filters)


def point_filter(inspector: RolloutList, trace: Any, point: Point) -> dict[str, Any]:
    """Return the inspector's filters for one point of a trace, or for the cell (row, column) of a heat map."""
    meta = trace.meta if isinstance(trace.meta, Mapping) else {}
    filters = copy.deepcopy(dict(meta.get("filter") or {}))
    custom = point_item(trace.customdata, point)
    if isinstance(custom, Mapping):
        return filters | dict(custom)
    if custom is not None and not isinstance(custom, str) and len(custom) and isinstance(custom[0], str):
        custom = custom[0]
    if isinstance(custom, str):
        return filters | {"sql": custom}
    axes = {axis: meta[axis] for axis in ("x", "y") if isinstance(meta.get(axis), str)}
    if not axes and not filters:
        if trace.hoverinfo == "skip":
            return {}
        axes = {"x": "step"}
        if trace.name in inspector.source.runs:
            filters["run_id"] = trace.name
    for axis, column in axes.items():
        place = point if isinstance(point, int) else point[("y", "x").index(axis)]
        value = point_item(getattr(trace, axis, None), place)
        if value is not None:
            filters[column] = value.item() if hasattr(value, "item") else value
    return filters


def point_item(values: Any, point: Point) -> Any:
    """Return the value of a point or of a cell; None if there is none."""
    for index in (point,) if isinstance(point, int) else point:
        if values is None or index >= len(values):
            return None
        values = values[index]
    return values


def _points(trace: Any) -> list[Point]:
    if isinstance(trace, go.Heatmap) and trace.z is not None:
        return [(row, column) for row, values in enumerate(trace.z) for column in range(len(values))]
    values = getattr(trace, "x", None)
    return [] if values is None else list(range(len(values)))


def _distinct(filters: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({json.dumps(each, sort_keys=True, default=str): each for each in filters}.values())


_NAMES = {"run_id": "run", "problem_id": "problem", "group_id": "group", "traj_id": "trajectory"}


def _describe(filters: Mapping[str, Any]) -> str:
    words = []
    for key, value in filters.items():
        if isinstance(value, bool):
            words.append(key if value else f"not {key}")
        elif key == "steps":
            words.append(f"steps {value[0]} to {value[1]}")
        elif key == "ranges":
            words += [f"{column} {low:g} to {high:g}" for column, (low, high) in value.items()]
        elif key == "sql":
            words.append(value)
        elif key == "any":
            words.append(" or ".join(each if isinstance(each, str) else _describe(each) for each in value))
        elif isinstance(value, list) and len(value) != 1:
            words.append(counted(len(value), _NAMES.get(key, key)))
        else:
            words.append(f"{_NAMES.get(key, key)} {value[0] if isinstance(value, list) else value}")
    return ", ".join(words)
