"""Base class of the notebook widgets: static output without a browser, a live widget with one, recovery from lost models."""

import asyncio
import math
import os
import sys
import time
import uuid
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypedDict

import anywidget
import traitlets
from IPython.display import display, update_display

from rstar_lab.common.errors import UserError
from rstar_lab.untrusted.text import Html

_REPLACE_AFTER_S = 3.0


def check_interval(every_s: float) -> None:
    """Raise UserError unless the seconds between two updates are a positive number."""
    if not (math.isfinite(every_s) and every_s > 0):
        raise UserError(f"every_s must be a positive number of seconds, not {every_s}")


def start_task(follow: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None] | None:
    """Start a coroutine in the event loop of the notebook, and return its task; None outside of a notebook (in a script)."""
    try:
        return asyncio.get_running_loop().create_task(follow())
    except RuntimeError:
        return None


# What a notebook shows without a kernel, by MIME type. HTML is made by the escaping functions of `untrusted.text`.
Bundle = TypedDict(
    "Bundle", {"text/html": Html, "text/plain": str, "image/svg+xml": str, "application/vnd.plotly.v1+json": Any}, total=False
)  # fmt: skip


class _Meta(ABCMeta, traitlets.MetaHasTraits):
    """Metaclass for classes that have both abstract methods and traits."""


class NotebookWidget(anywidget.AnyWidget, metaclass=_Meta):
    """A widget that displays static output first and replaces it when a browser connects.

    A notebook executed without a browser (papermill, nbconvert) therefore keeps output that needs no kernel, and never
    shows "model not found". If a model takes more than two seconds to start, anywidget stops delivering the kernel's
    messages to it for good. The browser reports this, and a new model replaces the old one.
    """

    def __init__(self, **state: Any) -> None:
        self._display_ids: list[str] = []
        self._connected_at: float | None = None
        self._replacement: Self | None = None
        super().__init__(**state)
        self.on_msg(self._on_connection)

    @abstractmethod
    def static_bundle(self) -> Bundle:
        """Return the MIME bundle of the static output."""

    @abstractmethod
    def replacement(self) -> Self:
        """Return a new widget with the same state. Changes to either widget apply to both."""

    def _ipython_display_(self, **_: Any) -> None:
        display(self.static_bundle(), raw=True)
        display_id = uuid.uuid4().hex
        self._display_ids.append(display_id)
        live = self._connected_at is not None or _always_has_browser()
        display(self._live_bundle() if live else {"text/html": ""}, raw=True, display_id=display_id)

    def _live_bundle(self) -> dict[str, Any]:
        bundle = self._repr_mimebundle_()
        return dict(bundle[0] if isinstance(bundle, tuple) else bundle or {})

    def _on_connection(self, _widget: Any, message: Any, _buffers: Any) -> None:
        op = message.get("op") if isinstance(message, dict) else None
        if op == "hello":
            self.send({"op": "welcome"})
            if self._connected_at is None:
                self._connected_at = time.monotonic()
                for display_id in self._display_ids:
                    update_display(self._live_bundle(), raw=True, display_id=display_id)
        elif op == "deaf" and self._replacement is None:
            # If the kernel was busy, both messages arrive together, and the answer to "hello" may still reach the page.
            if self._connected_at is None or time.monotonic() - self._connected_at < _REPLACE_AFTER_S:
                return
            self._replacement = self.replacement()
            self._replacement._display_ids = self._display_ids


def _always_has_browser() -> bool:
    return "google.colab" in sys.modules or any(name.startswith("VSCODE_") for name in os.environ)
