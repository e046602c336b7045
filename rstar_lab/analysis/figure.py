"""`Figure`: a plotly figure with its data, the rollouts behind each point, and export to files."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from IPython.display import display

from rstar_lab.analysis.figure_image import figure_image
from rstar_lab.analysis.figure_theme import apply_theme
from rstar_lab.analysis.inspector.export import content_hash
from rstar_lab.analysis.inspector.link import LinkedFigure, point_item
from rstar_lab.runs import RunStoreError
from rstar_lab.runs.files import atomic_write


class Figure(go.Figure):
    """A plotly figure in the project's theme. It also holds the plotted data, and the rollouts behind each point.

    frame: one row per plotted value. mode: "light" or "dark".
    """

    def __init__(self, figure: go.Figure, frame: pd.DataFrame, mode: str = "light"):
        super().__init__(figure)
        self._frame = frame
        apply_theme(self, mode)

    @property
    def frame(self) -> pd.DataFrame:
        """The data that the figure shows."""
        return self._frame

    def dark(self) -> "Figure":
        """Return the same figure for dark pages."""
        return Figure(self, self._frame, "dark")

    def save(self, path: str | Path, width: int = 900, height: int | None = None) -> Path:
        """Write the figure to a file and return its path.

        The suffix selects the format: .png, .svg and .pdf (need a local Chrome or Chromium), .html (self-contained, works
        offline), .json, or .csv (the data). width, height: pixels.
        Raises RunStoreError for another suffix, and for an image format if no browser is installed.
        """
        path = Path(path)
        data: str | bytes
        match path.suffix:
            case ".csv":
                data = self._frame.to_csv(index=False)
            case ".json":
                data = self.to_json()
            case ".html":
                data = _with_policy(self.to_html(include_plotlyjs=True, full_html=True))
            case ".png" | ".svg" | ".pdf":
                try:
                    data = figure_image(self, path.suffix[1:], width, height or self.layout.height or 480, 2)
                except RunStoreError as error:
                    hint = "install Chromium (Debian: `apt-get install chromium`) or Chrome, or save as .html or .csv"
                    raise RunStoreError(f"{path}: {error}: {hint}") from error
            case suffix:
                raise RunStoreError(f"{path}: cannot save as {suffix!r}; choose .png, .svg, .pdf, .html, .json or .csv")
        with atomic_write(path) as file:
            file.write(data if isinstance(data, bytes) else data.encode("utf-8", "replace"))
        return path

    def _ipython_display_(self, **_: Any) -> None:
        """Display a widget that follows the page's theme, or plotly's own output if PLOTLY_RENDERER is set."""
        if os.environ.get("PLOTLY_RENDERER"):
            super()._ipython_display_()
        else:
            display(LinkedFigure(self, None))

    def where(self, trace: int, points: Sequence[Any]) -> dict[str, Any]:
        """Return the filter that selects the trajectories behind these points of a trace.

        trace: index of the trace. points: indices of its points, or (row, column) pairs in a heat map.
        The filter selects nothing for a trace without trajectories, such as a confidence band.
        """
        custom = self.data[trace].customdata
        return {"any": [] if custom is None else [point_item(custom, point) for point in points]}


def _with_policy(page: str) -> str:
    """Return a page with a content security policy that runs only the scripts in it, by their hashes, and loads nothing."""
    hashes = " ".join(map(content_hash, re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)))
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return page.replace("<head>", f'<head><meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
