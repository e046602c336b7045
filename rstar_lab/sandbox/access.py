"""What stands before the application: who may come in, from where, and with how much."""

import hmac
import json
from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rstar_lab.errors import UserError

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
OPEN_PATHS = frozenset({"/ping"})


def check_exposure(host: str, token: str | None) -> None:
    """Raises UserError where the service would listen beyond this machine without a token."""
    if host not in LOOPBACK and not token:
        raise UserError(
            f"--host {host} is reachable from other machines, so a token is required: set RSTAR_LAB_SANDBOX_TOKEN, "
            "or give --token-file (clients send it as `Authorization: Bearer TOKEN`)"
        )
    if token is not None and len(token) < 16:
        raise UserError("the token must have at least 16 characters; `openssl rand -hex 32` makes one")


class AccessMiddleware:
    """ASGI middleware.

    Without a token, only requests addressed to this machine by a loopback name pass: a web page the user visits can
    send requests here, but not under such a name (DNS rebinding) nor as JSON (cross-site form).
    """

    def __init__(self, app: ASGIApp, *, token: str | None, max_body: int, loopback_only: bool) -> None:
        self.app = app
        self.token = f"Bearer {token}".encode() if token else None
        self.max_body = max_body
        self.loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = dict(scope["headers"])
        if refusal := self.refusal(scope, headers):
            await refuse(send, *refusal)
            return
        await self.app(scope, self.bounded(receive), send)

    def refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        given = headers.get(b"authorization", b"")
        if self.token and scope["path"] not in OPEN_PATHS and not hmac.compare_digest(given, self.token):
            return 401, "send the token as `Authorization: Bearer TOKEN`"
        if self.loopback_only and not self.token and not is_loopback(headers.get(b"host", b"")):
            return 400, "this service answers only to localhost: it has no token"
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 15:
            return 400, "content-length is no number"
        if int(length) > self.max_body:
            return 413, self.too_large()
        if scope["method"] == "POST" and not headers.get(b"content-type", b"").lower().startswith(b"application/json"):
            return 415, "send JSON, with `Content-Type: application/json`"
        return None

    def too_large(self) -> str:
        return f"the request is larger than {self.max_body} bytes: send smaller batches"

    def bounded(self, receive: Receive) -> Receive:
        taken = 0

        async def bounded_receive() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.max_body:
                raise HTTPException(413, self.too_large(), headers={"Connection": "close"})
            return message

        return bounded_receive


def is_loopback(host: bytes) -> bool:
    name = host.decode("latin-1").lower()
    name = name.split("]")[0].lstrip("[") if name.startswith("[") else name.rsplit(":", 1)[0] if ":" in name else name
    return name in LOOPBACK


async def refuse(send: Send, status: int, detail: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    body = json.dumps({"detail": detail}).encode()
    extra = [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *extra,
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})
