"""The version of a server's weights. vLLM reports one only in some releases."""

from starlette.requests import Request
from starlette.responses import JSONResponse

from rstar_lab.rl.engines.server import VERSION_PATH
from rstar_lab.rl.serving.auth import App, Message, Receive, Send


class WeightVersion:
    """ASGI middleware: GET /weight_version returns {"version": N}, POST sets it. It is null until weights were pushed."""

    def __init__(self, app: App):
        self.app = app
        self.version: int | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != VERSION_PATH:
            await self.app(scope, receive, send)
            return
        if scope["method"] == "POST":
            self.version = int((await Request(scope, receive).json())["version"])
        await JSONResponse({"version": self.version})(scope, receive, send)
