"""Base class of the notebook forms."""

from abc import ABC, abstractmethod
from typing import Any

import ipywidgets as widgets

from rstar_lab.visible_text import escaped


class Form(ABC):
    """A form with the widget `root` and a line for errors. Where widgets cannot run, as on GitHub, `summary` is shown instead."""

    root: widgets.VBox

    def __init__(self) -> None:
        self.message = widgets.HTML()

    @abstractmethod
    def summary(self) -> str:
        """Return the state of the form as one line of text."""

    def show_error(self, error: Exception | None) -> None:
        """Show the message of an error, or clear the line."""
        self.message.value = f'<span role="alert"><b>{escaped(error)}</b></span>' if error else ""

    def _ipython_display_(self) -> None:
        from IPython.display import display

        bundle: dict[str, Any] = self.root._repr_mimebundle_() or {}
        text = f"{self.summary()}; open the notebook in JupyterLab to use the form"
        display({**bundle, "text/html": f"<p>{escaped(text)}</p>", "text/plain": text}, raw=True)
