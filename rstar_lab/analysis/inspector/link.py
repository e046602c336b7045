"""From a curve to its rollouts: click or box-select points or bars of a figure, and an inspector lists what is behind."""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import traitlets
from plotly.offline import get_plotlyjs

from rstar_lab.analysis.inspector.filters import where_clause
from rstar_lab.analysis.inspector.inspector import Inspector, bundle
from rstar_lab.analysis.inspector.widget import NotebookWidget
from rstar_lab.analysis.style import Figure

_SHOWN = 3


class LinkedFigure(NotebookWidget):
    """A plotly figure whose points open an inspector. A page loads plotly once, whatever the number of figures.

    What is behind a point is told by the trace: `customdata[i]` is an SQL condition on trajectories (as in the figures
    of `rstar_lab.analysis`) or a dict of the inspector's filters; `meta`, where it is a dict, may hold {"filter":
    filters of the whole trace, "x": column of x, "y": column of y}. A trace without any of these is read as x = step,
    its name a run where one is called so; one that shows no values on hover (a band) stands for nothing.
    """

    _esm = bundle("dom", "figure")
    _css = ".rl-figure { width: 100%; min-height: 120px; }"

    figure_json = traitlets.Unicode("{}").tag(sync=True)

    def __init__(self, figure: go.Figure, inspector: Inspector | None, **state: Any) -> None:
        self.inspector = inspector
        self._set(figure)
        super().__init__(**{"figure_json": figure.to_json(), **state})
        self.on_msg(self._on_points)

    def _set(self, figure: go.Figure) -> None:
        self.figure = figure

    def update_figure(self, figure: go.Figure) -> None:
        """Show another figure in place of this one."""
        self._set(figure)
        self.figure_json = figure.to_json()

    def static_bundle(self) -> dict[str, Any]:
        if isinstance(self.figure, Figure):
            return self.figure.bundle()
        return {"application/vnd.plotly.v1+json": json.loads(self.figure.to_json()), "text/plain": repr(self)}

    def again(self) -> "LinkedFigure":
        heir = LinkedFigure(self.figure, self.inspector)
        traitlets.dlink((self, "figure_json"), (heir, "figure_json"))
        return heir

    def _on_points(self, _widget: Any, message: Any, _buffers: Any) -> None:
        op = message.get("op") if isinstance(message, dict) else None
        if op == "plotly":
            self.send({"id": message["id"], "result": True}, [get_plotlyjs().encode()])
        elif op == "points" and self.inspector is not None:
            show_points(self.inspector, self.figure, [(int(trace), int(point)) for trace, point in message["points"]])


def link(figure: go.Figure, inspector: Inspector) -> "LinkedFigure | go.FigureWidget":
    """Tie a figure to an inspector. Show what this returns; a `FigureWidget` is tied as it is and returned.

    Raises UserError where a trace names a filter the inspector does not know.
    """
    for trace in figure.data:
        for filters in _distinct(point_filter(inspector, trace, i) for i in range(_size(trace))):
            where_clause(filters)
    if not isinstance(figure, go.FigureWidget):
        return LinkedFigure(figure, inspector)
    for number, trace in enumerate(figure.data):

        def on_points(_trace: Any, points: Any, _state: Any, number: int = number) -> None:
            if points.point_inds:
                show_points(inspector, figure, [(number, index) for index in points.point_inds])

        trace.on_click(on_points)
        trace.on_selection(on_points)
    return figure


def explore(figure: go.Figure, store: Any, **state: Any) -> Inspector:
    """Show a figure with an inspector under it that lists what is behind the points one clicks."""
    from IPython.display import display

    inspector = Inspector(store, **state)
    display(link(figure, inspector))
    display(inspector)
    return inspector


def show_points(inspector: Inspector, figure: go.Figure, points: Sequence[tuple[int, int]]) -> None:
    """List the rollouts behind (trace, point) pairs; all rollouts where there is none."""
    if not points:
        inspector.show()
        return
    found = [point_filter(inspector, figure.data[trace], point) for trace, point in points]
    filters = _distinct(one for one in found if one)
    label = "; ".join(_words(one) for one in filters[:_SHOWN])
    if len(filters) > _SHOWN:
        label += f"; and {len(filters) - _SHOWN} more points"
    if len(filters) == 1:
        inspector.show(label, **filters[0])
    elif filters:
        inspector.show(label, any=filters)


def point_filter(inspector: Inspector, trace: Any, point: int) -> dict[str, Any]:
    """The inspector's filters of one point of a trace."""
    meta = trace.meta if isinstance(trace.meta, Mapping) else {}
    filters = copy.deepcopy(dict(meta.get("filter") or {}))
    custom = trace.customdata[point] if trace.customdata is not None and point < len(trace.customdata) else None
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
        values = getattr(trace, axis, None)
        if values is not None and point < len(values):
            value = values[point]
            filters[column] = value.item() if hasattr(value, "item") else value
    return filters


def _size(trace: Any) -> int:
    values = getattr(trace, "x", None)
    return 0 if values is None else len(values)


def _distinct(filters: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    seen = {json.dumps(one, sort_keys=True, default=str): one for one in filters}
    return list(seen.values())


_NAMES = {"run_id": "run", "problem_id": "problem", "group_id": "group", "traj_id": "trajectory"}
_EQUALS = re.compile(r"\(?(\w+) (?:= |IN \()'?([^',()]+)'?\)?\)?")


def _sql_words(condition: str) -> str:
    """A condition in words where it only says what columns equal, else as it is."""
    found = [_EQUALS.fullmatch(part.strip()) for part in condition.split(" AND ")]
    if not all(found):
        return condition
    return ", ".join(f"{_NAMES.get(match[1], match[1])} {match[2]}" for match in found if match)


def _words(filters: Mapping[str, Any]) -> str:
    words = []
    for key, value in filters.items():
        if isinstance(value, bool):
            words.append(key if value else f"not {key}")
        elif key == "steps":
            words.append(f"steps {value[0]} to {value[1]}")
        elif key == "ranges":
            words += [f"{column} {low:g} to {high:g}" for column, (low, high) in value.items()]
        elif key == "sql":
            words.append(_sql_words(value))
        elif isinstance(value, list):
            words.append(f"{len(value)} {_NAMES.get(key, key)}s")
        else:
            words.append(f"{_NAMES.get(key, key)} {value}")
    return ", ".join(words)
