"""Limits of HTTP connections that uvicorn does not have: bytes of headers, time, and connections without the token."""

import asyncio
import logging
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rstar_lab.hardware.limits import raise_open_files
from rstar_lab.sandbox.access import ON_AUTHENTICATED

# Bytes of the headers of one request, and bytes that are neither headers nor body (the framing of chunks, trailers).
MAX_HEADER_BYTES = 16 * 1024
MAX_FRAMING_BYTES = 1024 * 1024
# Seconds in which a connection must send the complete headers of a request.
HEADER_TIMEOUT_S = 20.0
# Seconds in which a client must read the data sent to it, except for the last 64 KiB.
READ_TIMEOUT_S = 120.0
# Connections that have not sent a request with the token yet.
MAX_STRANGERS = 1024
# Seconds between two lines of the log about closed connections.
LOG_EVERY_S = 60.0
log = logging.getLogger(__name__)


class LimitedHTTPProtocol(HttpToolsProtocol):
    """Closes connections with too many bytes of headers, and those that do not send headers or read a response in time.

    Of the connections of a server that have not sent the token, at most `most_strangers` stay open: the oldest is closed. So
    clients with the token can always connect. The attributes are set in a subclass for each server (`http_limits`).
    """

    most_strangers = MAX_STRANGERS
    strangers: dict["LimitedHTTPProtocol", None]  # in the order in which they were opened
    logged = -LOG_EVERY_S
    _in_headers = True
    # Bytes that are not part of a body, since the start of the headers or since their end.
    _framing_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.strangers[self] = None
        self._update_header_timer()
        if len(self.strangers) > self.most_strangers:
            oldest = next(iter(self.strangers))
            self.strangers.pop(oldest)
            oldest.transport.abort()
            if time.monotonic() - self.logged > LOG_EVERY_S:
                type(self).logged = time.monotonic()
                log.warning("%d connections without the token are open: closing the oldest", self.most_strangers)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer("headers")
        self._stop_timer("reading")
        self.strangers.pop(self, None)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._framing_bytes += len(data)
        super().data_received(data)
        if self._framing_bytes > (MAX_HEADER_BYTES if self._in_headers else MAX_FRAMING_BYTES):
            self.send_400_response("The headers of the request are too large.")
        else:
            self._update_header_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self.scope[ON_AUTHENTICATED] = lambda: self.strangers.pop(self, None)  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_headers, self._framing_bytes = False, 0

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers, self._framing_bytes = True, 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer("reading", READ_TIMEOUT_S)

    def resume_writing(self) -> None:
        self._stop_timer("reading")
        super().resume_writing()

    def _update_header_timer(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._start_timer("headers", HEADER_TIMEOUT_S)
        else:
            self._stop_timer("headers")

    def _start_timer(self, name: str, seconds: float) -> None:
        """Close the connection in `seconds`, unless the timer runs already or is stopped."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()


def http_limits() -> dict[str, Any]:
    """Return the options of uvicorn for one server. The log says if this process may open only few files.

    At most a quarter of the files are connections without the token, and half of them are connections. More are answered with
    status 503.
    """
    files = raise_open_files()
    if files < 4 * MAX_STRANGERS:
        log.warning("this process may open only %d files (ulimit -n), half of which can be connections", files)
    attributes: dict[str, Any] = {"strangers": {}, "most_strangers": min(MAX_STRANGERS, files // 4)}
    protocol = type("LimitedHTTPProtocol", (LimitedHTTPProtocol,), attributes)
    return {"http": protocol, "limit_concurrency": files // 2}
