"""A service on the loopback interface that shows runs in the browser."""

import asyncio
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import comm
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rstar_lab.analysis.inspector.inspector import Inspector
from rstar_lab.analysis.inspector.link import LinkedFigure
from rstar_lab.analysis.inspector.overview import Overview, RunTable, overview
from rstar_lab.doctor import doctor
from rstar_lab.runs.errors import READ_ERRORS
from rstar_lab.untrusted.files import parse_json
from rstar_lab.untrusted.text import html
from rstar_lab.viewer.page_comm import PageComm, Pages, state_of_page

STATIC = Path(__file__).parent / "static"
MAX_MESSAGE = 2**22
REFRESH_S = 2.0
KEEP_ALIVE_S = 15.0
# Plotly is loaded from the service as a script of the page. Elements set their own widths and colours.
POLICY = (
    "default-src 'none'; script-src 'self' blob:; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data: blob:; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()), (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"), (b"cache-control", b"no-store"),
]  # fmt: skip


class Viewer:
    """The widgets of a runs folder, and the web application that shows them.

    Args:
        runs_dir: Folder of runs, or of one run.
        logs: What the doctor reads. Default: the selected runs.
    """

    def __init__(self, runs_dir: Path, logs: Path | None = None):
        self.token = secrets.token_urlsafe(24)
        self._logs = runs_dir if (runs_dir / "run.json").exists() else logs
        self._pages = Pages()
        self._lock = threading.RLock()  # of the widgets
        # Creates the connections of all widgets that this process creates from now on.
        comm.create_comm = lambda **_: PageComm(self._pages)
        self._overview: Overview = overview(runs_dir)
        self._root = runs_dir

    def application(self) -> Starlette:
        """Return the web application. Every request needs the token."""
        routes = [
            Route("/", self._page), Route("/models", self._models), Route("/events", self._events), Route("/doctor", self._doctor),
            Route("/static/{name}", self._static), Route("/message", self._message, methods=["POST"]),
        ]  # fmt: skip
        return Starlette(routes=routes, middleware=[Middleware(_Guard, token=self.token)], lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow())
        yield
        task.cancel()

    async def _follow(self) -> None:
        """Show the steps that runs write."""
        while True:
            await asyncio.sleep(REFRESH_S)
            with suppress(*READ_ERRORS):  # a run was moved or cut between two reads: the next update shows it
                await run_in_threadpool(self._refresh)

    def _refresh(self) -> None:
        with self._lock:
            had = self._overview.inspector is not None
            self._overview.refresh()
            if not had and self._overview.inspector is not None:
                self._pages.publish({"method": "reload"})

    async def _page(self, _request: Request) -> Response:
        return HTMLResponse((STATIC / "view.html").read_text(encoding="utf-8").replace("TOKEN", self.token))

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        widgets: dict[str, Any] = {"runs": RunTable, "curves": LinkedFigure, "rollouts": Inspector}
        if name == "view.css":
            styles = [str(widget._css) for widget in widgets.values()]
            return Response("\n".join([*styles, (STATIC / name).read_text(encoding="utf-8")]), media_type="text/css")
        tab = name.removesuffix(".js")
        text = str(widgets[tab]._esm) if tab in widgets else (STATIC / "view.js").read_text(encoding="utf-8")
        return Response(text, media_type="text/javascript")

    async def _models(self, _request: Request) -> Response:
        with self._lock:
            tabs = {"runs": self._overview.table, "curves": self._overview.figure, "rollouts": self._overview.inspector}
            models = {
                name: {"id": str(widget.model_id), "state": state_of_page(widget)}
                for name, widget in tabs.items()
                if widget is not None
            }
        return JSONResponse({"title": str(self._root), "models": models})

    async def _message(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_MESSAGE:
                return Response(status_code=413)
        message = parse_json(body, "the message of the page", dict[str, Any])
        page_comm = self._pages.comms.get(str(message.pop("id")))
        if page_comm is None:
            return Response(status_code=404)

        def handle() -> None:
            with self._lock:
                page_comm.receive(message)

        await run_in_threadpool(handle)
        return Response(status_code=204)

    async def _events(self, request: Request) -> Response:
        async def lines() -> AsyncIterator[str]:
            with self._pages.connect() as pending:
                yield ": connected\n\n"
                while not await request.is_disconnected():
                    try:
                        yield f"data: {await asyncio.wait_for(pending.get(), KEEP_ALIVE_S)}\n\n"
                    except TimeoutError:
                        yield ": alive\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def _doctor(self, _request: Request) -> Response:
        def diagnosis() -> str:
            paths = [self._logs] if self._logs else [self._root / run_id for run_id in self._overview.selected]
            try:
                return doctor(*paths or [self._root]).to_html()
            except READ_ERRORS as error:
                return html("<!doctype html><p>{}</p>", error)

        return HTMLResponse(await run_in_threadpool(diagnosis))


class _Guard:
    """Middleware: refuses requests without the token, and sets the content security policy."""

    def __init__(self, app: Any, token: str):
        self._app, self._token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Request(scope).query_params.get("token", "")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            refused = Response("this address needs the token that `rstar-lab view` printed", status_code=401)
            await refused(scope, receive, send)
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
            await send(message)

        await self._app(scope, receive, guarded)


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cancel the event streams of open pages. uvicorn logs each of them as an error, which it is not."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)


def serve(viewer: Viewer, listener: socket.socket) -> None:
    """Serve until the process is interrupted."""
    config = uvicorn.Config(viewer.application(), log_level="warning", timeout_graceful_shutdown=1)
    with suppress(KeyboardInterrupt):  # raised after the end: there is nothing to continue
        _Server(config).run(sockets=[listener])
