"""One look for every figure: readable in print, by the colour-blind, on light and on dark pages."""

import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from IPython.display import display

from rstar_lab.runs import RunStoreError

# Okabe and Ito's palette (2008): told apart by every common kind of colour vision, and by lightness in grey print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
_ROWS = 20  # of a figure's numbers, where it cannot be drawn
_LINE = 780  # pixels a line of the legend may take: figures are 900 wide in print and more on the page
_INK = {"light": ("#1b1b1b", "#ffffff", "#e2e2e2"), "dark": ("#ececec", "#16181d", "#3a3d45")}


def template(mode: str = "light") -> go.layout.Template:
    """The plotly template, `light` or `dark`."""
    ink, paper, grid = _INK[mode]
    axis = {
        "gridcolor": grid, "zeroline": False, "linecolor": ink, "ticks": "outside", "automargin": True,
        "exponentformat": "power", "minexponent": 4, "separatethousands": True,
    }  # fmt: skip
    return go.layout.Template(
        layout={
            "colorway": COLOURS,
            "font": {"family": "Helvetica, Arial, sans-serif", "size": 13, "color": ink},
            "paper_bgcolor": paper,
            "plot_bgcolor": paper,
            "xaxis": axis,
            "yaxis": axis,
            "hovermode": "closest",
            "margin": {"l": 60, "r": 20, "b": 48},
            "title": {"x": 0, "xref": "paper", "yref": "container", "yanchor": "top", "font": {"size": 15}},
            "legend": {
                "orientation": "h",
                "yref": "container",
                "yanchor": "top",
                "x": 0,
                "bgcolor": "rgba(0,0,0,0)",
                "traceorder": "normal",
            },
            "annotationdefaults": {"font": {"size": 14}},
            "shapedefaults": {"line": {"color": ink}},
        }
    )


def _above(figure: go.Figure) -> None:
    """Stack title, legend and panel titles above the panels, each in room of its own."""
    height = figure.layout.height or 400
    top = 10
    layout: dict[str, Any] = {"height": height}
    if figure.layout.title.text:
        layout["title_y"] = 1 - top / height
        top += 32
    shown = [trace.name for trace in figure.data if trace.showlegend is not False and trace.name]
    if figure.layout.showlegend is not False and (len(shown) > 1 or any(trace.showlegend for trace in figure.data)):
        layout["legend_y"] = 1 - top / height
        lines, used = 1, 0
        for name in shown:
            wide = 48 + 7 * len(name)
            lines, used = (lines, used + wide) if used + wide <= _LINE or not used else (lines + 1, wide)
        top += 8 + 21 * lines
    if any(note.yref == "paper" and note.yanchor == "bottom" for note in figure.layout.annotations):
        top += 26
    figure.update_layout(layout, margin_t=top + 8)


class Figure(go.Figure):
    """A plotly figure that knows the numbers it shows (`frame`) and the rollouts behind each of its points."""

    def __init__(self, figure: go.Figure, frame: pd.DataFrame, mode: str = "light"):
        super().__init__(figure)
        self._frame = frame
        self.update_layout(template=template(mode))
        _above(self)

    @property
    def frame(self) -> pd.DataFrame:
        """The figure as data."""
        return self._frame

    def dark(self) -> "Figure":
        """The same figure for dark pages."""
        return Figure(self, self._frame, "dark")

    def save(self, path: str | Path, width: int = 900, height: int | None = None) -> Path:
        """Write .png, .svg or .pdf (by a local Chrome or Chromium), .html (whole, works offline), .json or .csv (the data).

        width, height: pixels. Raises RunStoreError for another suffix, or where no browser is installed.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        match path.suffix:
            case ".csv":
                self._frame.to_csv(path, index=False)
            case ".json":
                path.write_text(self.to_json())
            case ".html":
                self.write_html(path, include_plotlyjs=True, full_html=True)
            case ".png" | ".svg" | ".pdf":
                try:
                    self.write_image(path, width=width, height=height or self.layout.height or 480, scale=2)
                except Exception as error:
                    if not any(word in str(error).lower() for word in ("chrome", "browser", "kaleido")):
                        raise
                    hint = "install Debian's `chromium` (or Chrome), or save .html or .csv"
                    raise RunStoreError(f"cannot draw {path}: {hint}") from error
            case other:
                raise RunStoreError(f"cannot save as {other!r}: choose .png, .svg, .pdf, .html, .json or .csv")
        return path

    def bundle(self) -> dict[str, Any]:
        """MIME bundle for a notebook: JupyterLab draws it, what cannot (GitHub, nbconvert) shows its numbers."""
        shown = self._frame.drop(columns="where", errors="ignore").head(_ROWS)
        more = f" (the first {_ROWS} rows)" if len(self._frame) > _ROWS else ""
        table = shown.to_html(index=False, border=0, na_rep="–", float_format="{:.4g}".format)
        return {
            "application/vnd.plotly.v1+json": json.loads(self.to_json()),
            "text/html": f"<p>The numbers of this figure, which is not drawn here{more}:</p>{table}",
            "text/plain": repr(self._frame),
        }

    def _ipython_display_(self, **_: Any) -> None:
        """Drawn in the colours of the page where one is alive; as plotly would where a renderer was chosen."""
        if os.environ.get("PLOTLY_RENDERER"):
            super()._ipython_display_()
            return
        from rstar_lab.analysis.inspector.link import LinkedFigure

        display(LinkedFigure(self, None))

    def where(self, trace: int, points: Sequence[Any]) -> str:
        """SQL condition on trajectories for these points of a trace; `false` where the trace has none (a band).

        A point is its index, or (row, column) in a heat map.
        """
        found = self.data[trace].customdata
        conditions = [] if found is None else [_condition(found, point) for point in points]
        return " OR ".join(f"({condition})" for condition in dict.fromkeys(conditions)) or "false"

    def on_select(self, show: Callable[[str], Any] | Any) -> go.FigureWidget:
        """A live copy of the figure; a click or a box selection calls `show` with the condition of the points chosen.

        show: a function of an SQL condition, or an inspector. Needs a notebook with its kernel.
        """
        call = show if callable(show) else lambda condition: show.show(label="from the figure", sql=condition)
        widget = go.FigureWidget(self)
        widget.update_layout(clickmode="event+select")

        def chosen(trace: Any, points: Any, *_: Any) -> None:
            if points.point_inds:
                call(
                    self.where(
                        points.trace_index if points.trace_index is not None else trace.trace_index, points.point_inds
                    )
                )

        for trace in widget.data:
            if trace.customdata is not None:
                trace.on_click(chosen)
                trace.on_selection(chosen)
        return widget


def _condition(found: Any, point: Any) -> str:
    for index in point if isinstance(point, Sequence) else [point]:
        found = found[index]
    return str(found)


def looks(names: list[Any]) -> dict[Any, tuple[str, str, str]]:
    """Colour, dash and symbol of each name: three channels, so that none has to be told by colour alone."""
    channels = zip(itertools.cycle(COLOURS), itertools.cycle(DASHES), itertools.cycle(SYMBOLS), strict=False)
    return dict(zip(names, channels, strict=False))


def faint(colour: str, opacity: float = 0.18) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
