"""A scripted HTTP server with the endpoints of vLLM that `ServerEngine` uses. It can die or hang at a chosen request."""

import asyncio
import json
from typing import Any

from rstar_lab.rl.engines.server import ServerEngine

UPDATE = ("/pause", "/collective_rpc", "/reset_prefix_cache", "/weight_version", "/resume")  # in this order


class ScriptedServer:
    """dies_at: the server closes all its connections and its port when it receives a request for this path. hangs_at: it does
    not answer requests for this path. status: HTTP status of paths that are not answered with 200. answers: path to the body of
    its answer, instead of vLLM's.
    """

    def __init__(self) -> None:
        self.port = 0
        self.dies_at = self.hangs_at = ""
        self.status: dict[str, int] = {}
        self.answers: dict[str, bytes] = {}
        self.paths: list[str] = []
        self.version: int | None = None
        self.paused = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start to listen. A restarted server uses the same port and has no weight version."""
        self.version, self.paused = None, False
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    def die(self) -> None:
        if self._listener:
            self._listener.close()
        for writer in self._writers:
            writer.transport.abort()

    async def engine(self, **options: Any) -> ServerEngine:
        """Return an engine that is connected to this server."""
        engine = ServerEngine(self.url, **options)
        await engine.start()
        return engine

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                length = next(
                    (int(line[15:]) for line in head.lower().split("\r\n") if line[:15] == "content-length:"), 0
                )
                body = json.loads(await reader.readexactly(length) or b"null")
                path = path.partition("?")[0]
                self.paths.append(path)
                if path == self.dies_at:
                    self.die()
                    return
                if path == self.hangs_at or (self.paused and path == "/v1/completions"):
                    await asyncio.Event().wait()
                text = b"#\n" if path == "/metrics" else json.dumps(self._answer(method, path, body)).encode()
                text = self.answers.get(path, text)
                status = self.status.get(path, 200)
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    def _answer(self, method: str, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "model", "root": "model", "max_model_len": 512}]}
        if path == "/v1/completions":
            choice = {"token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}
            return {"choices": [choice]}
        if path == "/pause":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/reset_prefix_cache":
            return {"success": True}
        elif path == "/weight_version":
            self.version = body["version"] if method == "POST" else self.version
            return {"version": self.version}
        return {}
