"""One screen: figures beside an inspector, in one widget. A click in a figure lists the rollouts behind the point."""

from collections.abc import Sequence
from html import unescape
from typing import Any

import plotly.graph_objects as go
import traitlets
from IPython.display import display

from rstar_lab.analysis.figure_theme import template
from rstar_lab.analysis.inspector.inspector import Inspector
from rstar_lab.analysis.inspector.link import LinkedFigure, answer_figure, check_links, themed
from rstar_lab.analysis.inspector.source import StoreLike
from rstar_lab.common.errors import UserError

MAX_FIGURES = 3


class Explorer(Inspector):
    """An inspector with linked figures. Made by `explore`."""

    figures = traitlets.List(trait=traitlets.Dict()).tag(sync=True)  # of {name, json}
    dark_template = traitlets.Dict(template("dark").to_plotly_json()).tag(sync=True)

    def __init__(self, figures: Sequence[go.Figure], store: StoreLike, **state: Any) -> None:
        self.linked = [themed(figure) for figure in figures]
        payload = [{"name": _name(figure, i), "json": figure.to_json()} for i, figure in enumerate(self.linked, 1)]
        super().__init__(store, **{"height": 900, "figures": payload, **state})
        for figure in self.linked:
            check_links(self, figure)

    def _on_message(self, widget: Any, message: Any, buffers: Any) -> None:
        if not answer_figure(self, message, self.linked, self):
            super()._on_message(widget, message, buffers)

    def _ipython_display_(self, **options: Any) -> None:
        for figure in self.linked:
            display(LinkedFigure(figure, self).static_bundle(), raw=True)
        super()._ipython_display_(**options)

    def replacement(self) -> "Explorer":
        widget = Explorer(self.linked, self.source.store)
        self.share_state(widget)
        traitlets.dlink((self, "figures"), (widget, "figures"))
        return widget


def explore(figures: go.Figure | Sequence[go.Figure], store: StoreLike, **state: Any) -> Explorer:
    """Return one widget with up to three figures and the list of rollouts beside them. Display it in a cell.

    A click on a point or a box around several points lists their rollouts and opens the first one. On a page wider than 1500
    pixels the figures are on the left, else they are above the list.

    figures: figures whose points define their rollouts, see `LinkedFigure`. store: the result of `open_runs`, a runs folder,
    or a data frame of trajectories. state: initial values of the inspector's traits, such as `filters`, `selected`, `height`.
    Raises UserError without figures, for too many, and if a trace names an unknown filter.
    """
    shown = [figures] if isinstance(figures, go.Figure) else list(figures)
    if not 1 <= len(shown) <= MAX_FIGURES:
        raise UserError(f"explore shows 1 to {MAX_FIGURES} figures, got {len(shown)}")
    return Explorer(shown, store, **state)


def _name(figure: go.Figure, number: int) -> str:
    """Return a short name of a figure for its tab: its title or the title of its first panel."""
    titles = [figure.layout.title.text, *(note.text for note in figure.layout.annotations)]
    if any(isinstance(trace, go.Heatmap) for trace in figure.data):
        return "Heat map"
    return next((unescape(str(title))[:24] for title in titles if title), f"Figure {number}")
