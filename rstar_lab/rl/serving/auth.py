"""Asks every request for the token. vLLM's own --api-key leaves paths open that generate too, or that change the server."""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

TOKEN = "RSTAR_LAB_GUARD_TOKEN"  # the environment's, so that no list of processes shows it


class TokenGuard:
    """ASGI middleware: 401 without `Authorization: Bearer TOKEN`. /health, which tells nothing, is open."""

    def __init__(self, app: App):
        self.app, self.expected = app, f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] != "lifespan":
                return  # no other protocol has anything to do here
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
