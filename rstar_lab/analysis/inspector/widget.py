"""Base class of the notebook widgets: static output without a browser, a live widget with one, recovery from lost models."""

import asyncio
import math
import os
import sys
import time
import uuid
from abc import ABC, ABCMeta, abstractmethod
from contextlib import suppress
from typing import Any, Self, TypedDict

import anywidget
import traitlets
from IPython.display import display, update_display

from rstar_lab.common.errors import UserError
from rstar_lab.untrusted.text import Html

_REPLACE_AFTER_S = 3.0


class Follower(ABC):
    """A display that is updated while runs are written, in the event loop of the notebook. In a script it is not updated.

    Raises UserError unless `every_s`, the seconds between two updates, is a positive number.
    """

    def __init__(self, every_s: float) -> None:
        if not (math.isfinite(every_s) and every_s > 0):
            raise UserError(f"every_s must be a positive number of seconds, not {every_s}")
        self.every_s = every_s
        self.task: asyncio.Task[None] | None = None

    @abstractmethod
    async def update(self) -> None:
        """Read the runs again."""

    def ended(self) -> bool:
        """Return whether no more updates will come."""
        return False

    def start(self) -> None:
        """Update the display until the runs end."""
        if self.task is None and not self.ended():
            with suppress(RuntimeError):  # no event loop
                self.task = asyncio.get_running_loop().create_task(self._follow())

    def stop(self) -> None:
        """Stop updating. The display stays."""
        if self.task is not None:
            self.task.cancel()
            self.task = None

    async def _follow(self) -> None:
        while not self.ended():
            await asyncio.sleep(self.every_s)
            await self.update()


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
        always = "google.colab" in sys.modules or any(name.startswith("VSCODE_") for name in os.environ)
        live = self._connected_at is not None or always
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
