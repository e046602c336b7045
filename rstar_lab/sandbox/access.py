"""Access control for the HTTP service: token, host name, content type, and limits on size and time of a request."""

import asyncio
import contextlib
import hmac
import json
import re
import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rstar_lab.common.errors import UserError
from rstar_lab.common.service_tokens import LOOPBACK

if TYPE_CHECKING:
    from rstar_lab.sandbox.service import Service

OPEN_PATHS = frozenset({"/", "/ping"})
# Key of a scope: a function that is called when a request has the token.
ON_AUTHENTICATED = "rstar_lab.on_authenticated"
# Seconds in which a client must have sent its whole request body.
BODY_TIMEOUT_S = 60.0
RETRY_AFTER_S = 1
# Bytes and seconds of a refused request that are read and dropped before its connection is closed.
LINGER_BYTES, LINGER_S = 16 * 1024**2, 2.0
LOOPBACK_HOST = re.compile(rb"(localhost|127\.0\.0\.1|\[::1\])(:\d*)?", re.IGNORECASE)


class BusyError(HTTPException):
    """The service has no room for a request; the client should retry after RETRY_AFTER_S seconds."""

    def __init__(self, *, stopping: bool = False) -> None:
        state = "the service is stopping" if stopping else "the queue is full"
        headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
        super().__init__(503 if stopping else 429, f"{state}; try again in {RETRY_AFTER_S} s", headers)


def check_exposure(host: str, token: str | None) -> None:
    """Raise UserError if the service would listen beyond this machine without a token."""
    if host not in LOOPBACK and not token:
        raise UserError(
            f"--host {host} is reachable from other machines, so a token is required: set RSTAR_LAB_SANDBOX_TOKEN, or give "
            "--token-file (clients send it as `Authorization: Bearer TOKEN`)"
        )
    if token is not None and len(token) < 16:
        raise UserError("the token must have at least 16 characters; `openssl rand -hex 32` prints one")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address. Raises UserError if the port is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}; is the port in use? Try another --port"
        ) from error
    return listener


class AccessMiddleware:
    """ASGI middleware that checks a request before its body is read.

    Two checks keep web pages that the user visits from using a service without a token: the Host header must be a loopback
    name (DNS rebinding), and a POST request must contain JSON (forms of other sites).

    max_body: largest body of one request, in bytes. service: limits the bytes of all requests, counted as they arrive.
    """

    def __init__(
        self, app: ASGIApp, *, token: str | None, max_body: int, loopback_only: bool, service: "Service"
    ) -> None:
        self.app = app
        self.service = service
        self.token = f"Bearer {token}".encode() if token else None
        self.max_body = max_body
        self.loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = dict(scope["headers"])
        authentic = self.token is None or hmac.compare_digest(headers.get(b"authorization", b""), self.token)
        if refusal := self.refusal(scope, headers, authentic):
            await refuse(send, *refusal, receive=receive)
            return
        if authentic and ON_AUTHENTICATED in scope:
            scope[ON_AUTHENTICATED]()
        body = LimitedBody(receive, self.service, self.max_body)
        try:
            # Not the announced length: a client that announces much and sends nothing would take the room of others.
            body.reserve(min(1, int(headers.get(b"content-length", b"0"))))
            await self.app(scope, body.receive, send)
        except BusyError as error:
            await refuse(send, error.status_code, error.detail, [(b"retry-after", b"%d" % RETRY_AFTER_S)])
        finally:
            self.service.hold_bytes(-body.reserved)

    def refusal(self, scope: Scope, headers: dict[bytes, bytes], authentic: bool) -> tuple[int, str] | None:
        """Return the status and message of a request that must not be answered; else None."""
        length = headers.get(b"content-length", b"0")
        if scope["path"] not in OPEN_PATHS and not authentic:
            return 401, "send the token as `Authorization: Bearer TOKEN`"
        if self.loopback_only and not self.token and not LOOPBACK_HOST.fullmatch(headers.get(b"host", b"")):
            return (
                400,
                "without a token this service accepts only requests to localhost; the Host header names another host",
            )
        if not length.isdigit() or len(length) > 15:
            return 400, "content-length is not a number"
        if int(length) > self.max_body:
            return 413, too_large(self.max_body)
        if scope["method"] == "POST" and not headers.get(b"content-type", b"").lower().startswith(b"application/json"):
            return 415, "send JSON, with `Content-Type: application/json`"
        return None


class LimitedBody:
    """Reads a request body and enforces limits on its bytes and on the time it takes to arrive."""

    def __init__(self, receive: Receive, service: "Service", max_body: int) -> None:
        self._receive = receive
        self._service = service
        self._max_body = max_body
        self._deadline = time.monotonic() + BODY_TIMEOUT_S
        self._read = self.reserved = 0
        self._complete = False

    def reserve(self, size: int) -> None:
        """Reserve bytes of the service so that `size` bytes are reserved in total. Raises BusyError if there is no room."""
        if size > self.reserved:
            self._service.reserve_bytes(size - self.reserved)
            self.reserved = size

    async def receive(self) -> Message:
        """Return the next ASGI message. Raises HTTPException for a body that is too large or too slow, or without room."""
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                message = await self._receive()
        except TimeoutError as error:
            detail = f"the request body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise HTTPException(408, detail, headers={"Connection": "close"}) from error
        self._read += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._read > self._max_body:
            raise HTTPException(413, too_large(self._max_body), headers={"Connection": "close"})
        self.reserve(self._read)
        return message


def too_large(max_body: int) -> str:
    return f"the request is larger than {max_body} bytes: send smaller batches"


async def refuse(
    send: Send, status: int, detail: str, headers: Iterable[tuple[bytes, bytes]] = (), receive: Receive | None = None
) -> None:
    """Send an error. receive: also close the connection, after at most LINGER_BYTES and LINGER_S of the rest of the request.

    A connection that is closed at once can lose the answer: the kernel then sends a reset for the bytes that were not read.
    """
    body = json.dumps({"detail": detail}).encode()
    all_headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    if status == 401:
        all_headers.append((b"www-authenticate", b"Bearer"))
    if receive:
        all_headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body, "more_body": receive is not None})
    if receive:
        left, more = LINGER_BYTES, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while more and left > 0:
                    message = await receive()
                    left, more = left - len(message.get("body", b"")), message.get("more_body", False)
        await send({"type": "http.response.body", "body": b""})
