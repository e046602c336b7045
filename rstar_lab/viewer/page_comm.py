"""Transport of widgets to a page of the browser: Jupyter's comm interface over a queue per page."""

import base64
import itertools
import json
import queue
import threading
from typing import Any

import comm
from comm.base_comm import BaseComm
from ipywidgets import Widget

MAX_PENDING = 10_000  # messages of a page that reads none


class Pages:
    """The open pages. Every message of a widget goes to all of them, as to several browsers at one kernel."""

    def __init__(self) -> None:
        self._queues: list[queue.Queue[str]] = []
        self._lock = threading.Lock()
        self.comms: dict[str, PageComm] = {}
        self._numbers = itertools.count(1)

    def widget_comm(self, **_: Any) -> "PageComm":
        """Create the connection of a new widget. Replaces `comm.create_comm`."""
        return PageComm(self, f"widget-{next(self._numbers)}")

    def connect(self) -> "queue.Queue[str]":
        """Return the queue of a new page."""
        pending: queue.Queue[str] = queue.Queue(MAX_PENDING)
        with self._lock:
            self._queues.append(pending)
        return pending

    def disconnect(self, pending: "queue.Queue[str]") -> None:
        """Forget a page that was closed."""
        with self._lock:
            self._queues.remove(pending)

    def publish(self, message: dict[str, Any]) -> None:
        """Send a message to all pages. A page that reads none misses it."""
        text = json.dumps(message)
        with self._lock:
            for pending in self._queues:
                if not pending.full():
                    pending.put(text)


class PageComm(BaseComm):
    """The connection of one widget."""

    def __init__(self, pages: Pages, comm_id: str):
        self._pages = pages
        pages.comms[comm_id] = self
        super().__init__(target_name="jupyter.widget", comm_id=comm_id)

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        """Send a message of the widget: changed state, or the answer to a request."""
        if msg_type == "comm_msg" and data:
            encoded = [base64.b64encode(bytes(buffer)).decode() for buffer in buffers or ()]
            self._pages.publish({"id": self.comm_id, "buffers": encoded, **data})

    def receive(self, data: dict[str, Any]) -> None:
        """Give the widget a message of a page."""
        self.handle_msg({"content": {"data": data | {"buffer_paths": []}}, "buffers": []})


def state_of_page(widget: Widget) -> dict[str, Any]:
    """Return the state of a widget that a page needs to draw it."""
    return {name: value for name, value in widget.get_state().items() if not name.startswith("_") and name != "layout"}


def use_pages(pages: Pages) -> None:
    """Connect the widgets that this process makes from now on to pages instead of a notebook."""
    comm.create_comm = pages.widget_comm
