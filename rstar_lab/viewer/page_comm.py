"""Transport of widgets to a page of the browser: Jupyter's comm interface over a queue per page."""

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from comm.base_comm import BaseComm
from ipywidgets import Widget

MAX_PENDING = 10_000  # messages of a page that reads none


class Pages:
    """The open pages. Every message of a widget goes to all of them, as to several browsers at one kernel."""

    def __init__(self) -> None:
        self._queues: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[str]]] = []
        self.comms: dict[str, PageComm] = {}

    @contextmanager
    def connect(self) -> Iterator[asyncio.Queue[str]]:
        """Yield the queue of a page until it is closed."""
        page = asyncio.get_running_loop(), asyncio.Queue[str]()
        self._queues.append(page)
        try:
            yield page[1]
        finally:
            self._queues.remove(page)

    def publish(self, message: dict[str, Any]) -> None:
        """Send a message to all open pages. Can be called in any thread. A page with MAX_PENDING unread messages does not get it."""
        text = json.dumps(message)
        for loop, pending in [*self._queues]:
            if pending.qsize() < MAX_PENDING:
                loop.call_soon_threadsafe(pending.put_nowait, text)


class PageComm(BaseComm):
    """The connection of one widget."""

    def __init__(self, pages: Pages):
        self._pages = pages
        super().__init__(target_name="jupyter.widget")
        pages.comms[self.comm_id] = self

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
