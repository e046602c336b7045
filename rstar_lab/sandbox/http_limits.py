"""Limits of HTTP connections that uvicorn does not have: bytes of headers, time, and number of connections."""

import asyncio
import logging
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rstar_lab.hardware.processes import raise_open_files
from rstar_lab.sandbox.access import ON_AUTHENTICATED

# Bytes of the headers of one request, and bytes that are neither headers nor body (the framing of chunks, trailers).
MAX_HEADER_BYTES = 16 * 1024
MAX_FRAMING_BYTES = 1024 * 1024
# Seconds in which a connection must send the complete headers of a request.
HEADER_TIMEOUT_S = 20.0
# Seconds in which a client must read the data sent to it, except for the last 64 KiB.
READ_TIMEOUT_S = 120.0
# Connections that have not sent a request with the token yet (at most half of all).
MAX_STRANGERS = 1024
# Most connections, and descriptors that are left for everything else (at most half of all).
MAX_CONNECTIONS, OTHER_DESCRIPTORS = 16_384, 512
# Seconds between two lines of the log about closed connections.
LOG_EVERY_S = 60.0
log = logging.getLogger(__name__)


class Connections:
    """All connections of one server, at most `most`.

    If there are more, or too many that have not sent the token, the oldest of the latter is closed. So clients with the token can
    always connect.
    """

    def __init__(self, most: int) -> None:
        self.most = max(1, most)
        self.open = 0
        # In the order in which they were opened.
        self._strangers: dict[LimitedHTTPProtocol, None] = {}
        self._logged = -LOG_EVERY_S

    def add(self, connection: "LimitedHTTPProtocol") -> None:
        """Count a new connection, and close one without the token, perhaps the new one, if there are too many."""
        self.open += 1
        self._strangers[connection] = None
        if self.open > self.most or len(self._strangers) > min(MAX_STRANGERS, max(1, self.most // 2)):
            oldest = next(iter(self._strangers))
            self.trust(oldest)
            oldest.transport.abort()
            if time.monotonic() - self._logged > LOG_EVERY_S:
                self._logged = time.monotonic()
                log.warning(
                    "%d connections are open, at most %d are accepted, half of them without the token: closing the oldest",
                    self.open,
                    self.most,
                )

    def trust(self, connection: "LimitedHTTPProtocol") -> None:
        """Record that a connection has sent a request with the token, or that it is closed."""
        self._strangers.pop(connection, None)

    def remove(self, connection: "LimitedHTTPProtocol") -> None:
        self.open -= 1
        self.trust(connection)


class LimitedHTTPProtocol(HttpToolsProtocol):
    """Closes connections with too many bytes of headers, and those that do not send headers or read a response in time.

    registry: all connections of the server; set in a subclass for each server (`limited_protocol`).
    """

    registry = Connections(MAX_CONNECTIONS)
    _in_headers = True
    # Bytes that are not part of a body, since the start of the headers or since their end.
    _framing_bytes = 0
    _counted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._counted = True
        self.registry.add(self)
        self._update_header_timer()

    def connection_lost(self, error: Exception | None) -> None:
        if self._counted:
            self._counted = False
            self._stop_timer("headers")
            self._stop_timer("reading")
            self.registry.remove(self)
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
        self.scope[ON_AUTHENTICATED] = lambda: self.registry.trust(self)  # type: ignore[literal-required]

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
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer("headers")
        else:
            self._start_timer("headers", HEADER_TIMEOUT_S)

    def _start_timer(self, name: str, seconds: float) -> None:
        """Close the connection in `seconds`, unless the timer runs already or is stopped."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()


def limited_protocol(most: int = MAX_CONNECTIONS) -> type[LimitedHTTPProtocol]:
    """Return a protocol class for one server.

    most: connections at once. If this process may not open as many files, fewer are accepted, and the log says so.
    """
    files = raise_open_files()
    possible = files - min(OTHER_DESCRIPTORS, files // 2)
    if possible < min(most, MAX_STRANGERS):
        log.warning(
            "this process may open only %d files (ulimit -n), so it accepts only %d connections", files, possible
        )
    attributes: dict[str, Any] = {"registry": Connections(min(most, possible))}
    return type("LimitedHTTPProtocol", (LimitedHTTPProtocol,), attributes)
