"""Store the version of a server's weights. Not all releases of vLLM have an endpoint for it."""

from starlette.requests import Request
from starlette.responses import JSONResponse

from rstar_lab.rl.engines.server_control import VERSION_PATH
from rstar_lab.rl.serving.auth import App, Message, Receive, Send


class WeightVersion:
    """ASGI middleware: GET /weight_version returns {"version": N}, POST sets it. N is null until weights are pushed."""

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
