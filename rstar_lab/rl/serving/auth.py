"""Checks the token of every request to a server. vLLM's own --api-key leaves some paths open that generate text or change the
server."""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

TOKEN = "RSTAR_LAB_GUARD_TOKEN"  # environment variable with the token; other users could read it on a command line


class TokenGuard:
    """ASGI middleware that answers 401 without `Authorization: Bearer TOKEN`. /health needs no token."""

    def __init__(self, app: App):
        self.app, self.expected = app, f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] != "lifespan":
                return  # websockets are not served
        elif scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                await send(
                    {"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]}
                )
                await send(
                    {"type": "http.response.body", "body": b'{"error": {"message": "the token is missing or wrong"}}'}
                )
                return
        await self.app(scope, receive, send)
