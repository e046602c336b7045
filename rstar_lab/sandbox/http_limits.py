"""Limits of HTTP connections that uvicorn does not have: bytes of headers, time, and number of connections."""

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rstar_lab.hardware.processes import raise_open_files
from rstar_lab.sandbox.access import ON_AUTHENTICATED

# Bytes of the headers of one request, and bytes that are neither headers nor body (the framing of chunks, trailers).
MAX_HEADER_BYTES = 64 * 1024
MAX_FRAMING_BYTES = 1024 * 1024
# Seconds in which a connection must send the complete headers of a request.
HEADER_TIMEOUT_S = 20.0
# Seconds in which a client must read the data sent to it, except for the last 64 KiB.
READ_TIMEOUT_S = 120.0
# Connections that have not sent a request with the token yet (at most half of all), and bytes of their unfinished headers. If there
# are more, one from the address with the most is closed, so that clients with the token can always connect.
MAX_STRANGERS, MAX_STRANGER_BYTES = 4096, 8 * 1024**2
# Descriptors that are left for everything else, and most connections.
OTHER_DESCRIPTORS, MAX_CONNECTIONS = 512, 16_384


class Connections:
    """All connections of one server."""

    def __init__(self, most: int) -> None:
        """most: connections that may be open at once."""
        self.most = max(1, most)
        self.open = self.bytes = 0  # bytes: of unfinished headers of strangers
        # In the order in which they were opened.
        self._strangers: dict[LimitedHTTPProtocol, str] = {}
        self._per_address: Counter[str] = Counter()

    def add(self, connection: "LimitedHTTPProtocol", address: str) -> bool:
        """Count a new connection, and close an older one without a valid token if there are too many.

        Returns False if the new one must be closed.
        """
        self.open += 1
        self._strangers[connection] = address
        self._per_address[address] += 1
        if len(self._strangers) > min(MAX_STRANGERS, max(1, self.most // 2)):
            crowd = max(self._per_address, key=self._per_address.__getitem__)
            self._close(next(other for other, origin in self._strangers.items() if origin == crowd))
        return self.open <= self.most

    def receive(self, connection: "LimitedHTTPProtocol", size: int) -> None:
        """Count bytes of unfinished headers, and close the stranger with the most if there are too many."""
        if connection in self._strangers:
            connection.unfinished += size
            self.bytes += size
            if self.bytes > MAX_STRANGER_BYTES:
                self._close(max(self._strangers, key=lambda other: other.unfinished))

    def finish_headers(self, connection: "LimitedHTTPProtocol") -> None:
        """Stop counting the bytes of a connection's headers."""
        self.bytes -= connection.unfinished
        connection.unfinished = 0

    def trust(self, connection: "LimitedHTTPProtocol") -> None:
        """Stop counting a connection as that of a stranger: it has sent a request with the token, or it is closed."""
        address = self._strangers.pop(connection, None)
        if address is not None:
            self.finish_headers(connection)
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    def remove(self, connection: "LimitedHTTPProtocol") -> None:
        self.open -= 1
        self.trust(connection)

    def _close(self, connection: "LimitedHTTPProtocol") -> None:
        self.trust(connection)
        connection.transport.abort()


class LimitedHTTPProtocol(HttpToolsProtocol):
    """Closes connections with too many bytes of headers, and those that do not send headers or read a response in time.

    registry: all connections of the server; set in a subclass for each server (`limited_protocol`).
    """

    registry = Connections(MAX_CONNECTIONS)
    _header_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    _in_headers = True
    # Bytes that are not part of a body, since the start of the headers or since their end.
    _framing_bytes = 0
    _counted = False
    unfinished = 0  # bytes counted by `Connections.receive`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._counted = True
        if self.registry.add(self, self.client[0] if self.client else ""):
            self._update_header_timer()
        else:
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_read_timer()
        if self._counted:
            self._counted = False
            self.registry.remove(self)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._framing_bytes += len(data)
        if self._in_headers:
            self.registry.receive(self, len(data))
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._framing_bytes > (MAX_HEADER_BYTES if self._in_headers else MAX_FRAMING_BYTES):
            self.send_400_response("The headers of the request are too large.")
        else:
            self._update_header_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self.scope[ON_AUTHENTICATED] = self._on_authenticated  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_headers, self._framing_bytes = False, 0
        self.registry.finish_headers(self)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers, self._framing_bytes = True, 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_read_timer()
        super().resume_writing()

    def _on_authenticated(self) -> None:
        self.registry.trust(self)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _update_header_timer(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.abort)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def limited_protocol(most: int = MAX_CONNECTIONS) -> type[LimitedHTTPProtocol]:
    """Return a protocol class for one server. most: connections at once; fewer if this process may not open as many files."""
    most = min(most, raise_open_files() - OTHER_DESCRIPTORS)
    attributes: dict[str, Any] = {"registry": Connections(most)}
    return type("LimitedHTTPProtocol", (LimitedHTTPProtocol,), attributes)
