"""What our widgets share: readable without a kernel, alive where a browser answers, restarted where it cannot hear."""

import os
import sys
import time
import uuid
from abc import ABCMeta, abstractmethod
from typing import Any, Self

import anywidget
import traitlets
from IPython.display import display, update_display

_DEAF_AFTER_S = 3.0


class _Meta(ABCMeta, traitlets.MetaHasTraits):
    """Abstract methods for classes with traits, which have a metaclass of their own."""


class NotebookWidget(anywidget.AnyWidget, metaclass=_Meta):
    """A widget that shows its static form first and takes that form's place once a browser says hello.

    A notebook run without a browser (papermill, nbconvert) therefore keeps output that needs no kernel, and never says
    "model not found". anywidget stops hearing the kernel for good where a model's start takes over two seconds (a busy
    page); the browser then says so, and a fresh model takes over.
    """

    def __init__(self, **state: Any) -> None:
        self._slots: list[str] = []
        self._greeted: float | None = None
        self._heir: Self | None = None
        super().__init__(**state)
        self.on_msg(self._on_greeting)

    @abstractmethod
    def static_bundle(self) -> dict[str, Any]:
        """MIME bundle of the static form."""

    @abstractmethod
    def again(self) -> Self:
        """A new widget in the same state, whose changes this one follows and leads."""

    def _ipython_display_(self, **_: Any) -> None:
        display(self.static_bundle(), raw=True)
        slot = uuid.uuid4().hex
        self._slots.append(slot)
        alive = self._greeted is not None or _always_has_browser()
        display(self._live_bundle() if alive else {"text/html": ""}, raw=True, display_id=slot)

    def _live_bundle(self) -> dict[str, Any]:
        bundle = self._repr_mimebundle_()
        return dict(bundle[0] if isinstance(bundle, tuple) else bundle or {})

    def _on_greeting(self, _widget: Any, message: Any, _buffers: Any) -> None:
        op = message.get("op") if isinstance(message, dict) else None
        if op == "hello":
            self.send({"op": "welcome"})
            if self._greeted is None:
                self._greeted = time.monotonic()
                for slot in self._slots:
                    update_display(self._live_bundle(), raw=True, display_id=slot)
        elif op == "deaf" and self._heir is None:
            # One that only waited behind a busy kernel comes right after its hello; let the next one tell.
            if self._greeted is None or time.monotonic() - self._greeted < _DEAF_AFTER_S:
                return
            self._heir = self.again()
            self._heir._slots = self._slots


def _always_has_browser() -> bool:
    return "google.colab" in sys.modules or any(name.startswith("VSCODE_") for name in os.environ)
