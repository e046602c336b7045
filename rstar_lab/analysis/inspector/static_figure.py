"""Figures for pages without a kernel: an SVG image, and a table of the data if no browser can draw the image."""

import functools
import json
import logging
import os
import warnings
from typing import Any

import pandas as pd
import plotly.graph_objects as go

MAX_ROWS = 20  # rows in the table
WIDTH = 900  # pixels of the image
_LOG = logging.getLogger(__name__)


def static_bundle(figure: go.Figure, frame: pd.DataFrame | None = None) -> dict[str, Any]:
    """Return the MIME bundle that notebooks show without a kernel.

    The bundle holds plotly's JSON (drawn by JupyterLab), an SVG image (shown by GitHub and nbconvert) and plain text. Without
    a local Chromium or Chrome, a table of the data replaces the image.

    frame: data of the figure. A column named "where" is left out of the table.
    """
    bundle: dict[str, Any] = {
        "application/vnd.plotly.v1+json": json.loads(figure.to_json()),
        "text/plain": repr(figure) if frame is None else repr(frame),
    }
    image = svg(figure)
    if image is not None:
        bundle["image/svg+xml"] = image
    elif frame is not None:
        bundle["text/html"] = data_table(frame)
    return bundle


def data_table(frame: pd.DataFrame) -> str:
    """Return the first rows of the data as an HTML table."""
    shown = frame.drop(columns="where", errors="ignore").head(MAX_ROWS)
    rows = f", rows 1 to {MAX_ROWS} of {len(frame)}" if len(frame) > MAX_ROWS else ""
    table = shown.to_html(index=False, border=0, na_rep="–", float_format="{:.4g}".format)
    return f"<p>Data of the figure{rows} (no browser was available to draw it):</p>{table}"


def svg(figure: go.Figure) -> str | None:
    """Render a figure with a local Chromium or Chrome. Returns None if no browser is installed.

    Returns None in a notebook server too, because the page draws the figure itself.
    """
    if "JPY_SESSION_NAME" in os.environ or not _start_browser():
        return None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The kopts argument is ignored")  # from plotly itself
            image = figure.to_image(format="svg", width=WIDTH, height=figure.layout.height or 450)
    except Exception as error:  # a broken browser must not hide the data
        _LOG.warning("cannot draw a static image of the figure (%s); showing a table instead", error)
        return None
    return bytes(image).decode()


@functools.cache
def _start_browser() -> bool:
    """Start the browser that renders all images of this process (about 2 s). Returns False if there is none."""
    try:
        import kaleido

        kaleido.start_sync_server(silence_warnings=True)
    except Exception as error:
        _LOG.info("no static images of figures: %s", error)
        return False
    return True
