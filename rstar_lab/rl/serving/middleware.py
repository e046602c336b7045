"""Middleware of the servers: checks the token of every request, and stores the version of the weights.

vLLM's own --api-key leaves some paths open that generate text or change the server, and not all its releases have an endpoint for
the version of the weights."""

import hmac
import os

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rstar_lab.rl.engines.server import VERSION_PATH

TOKEN = "RSTAR_LAB_GUARD_TOKEN"  # environment variable with the token; other users could read it on a command line


class TokenGuard:
    """ASGI middleware that answers 401 without `Authorization: Bearer TOKEN`. /health needs no token."""

    def __init__(self, app: ASGIApp):
        self.app, self.expected = app, f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] != "lifespan":
                return  # websockets are not served
        elif scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                refused = JSONResponse({"error": {"message": "the token is missing or wrong"}}, status_code=401)
                await refused(scope, receive, send)
                return
        await self.app(scope, receive, send)


class WeightVersion:
    """ASGI middleware: GET /weight_version returns {"version": N}, POST sets it. N is null until weights are pushed."""

    def __init__(self, app: ASGIApp):
        self.app = app
        self.version: int | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != VERSION_PATH:
            await self.app(scope, receive, send)
            return
        if scope["method"] == "POST":
            self.version = int((await Request(scope, receive).json())["version"])
        await JSONResponse({"version": self.version})(scope, receive, send)
