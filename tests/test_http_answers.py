"""A server that a user names cannot fill the memory of a client with its answer, or hold it for ever."""

import asyncio
import gzip
import threading

import httpx
import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.common.http_answers import AnswerTooLong, limit_answers
from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.engine import EngineError
from rstar_lab.rl.engines.server import ServerEngine
from rstar_lab.sandbox.client import SandboxClient

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
CARD = b'{"data": [{"id": "m", "max_model_len": 100}]}'


class Server:
    """An HTTP server in a thread: its answers never end. models: the answer to /v1/models, which ends."""

    def __init__(self, models: bytes = b""):
        self.models, self.chunk, self.pause_s = models, b'"' + b"x" * 2**20, 0.0
        self.loop, started = asyncio.new_event_loop(), threading.Event()

        async def serve() -> None:
            self.server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
            started.set()

        self.loop.create_task(serve())
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        assert started.wait(10)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            if self.models and b"/v1/models" in request:
                writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(self.models) + self.models)
                return
            writer.write(HEAD + b"\r\n")  # the body ends with the connection
            while True:
                writer.write(self.chunk)
                await writer.drain()
                await asyncio.sleep(self.pause_s)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture(params=[b"", CARD], ids=["no card", "card"])
def server(request):
    server = Server(models=request.param)
    yield server
    server.loop.call_soon_threadsafe(server.loop.stop)


@pytest.mark.timeout(60)
async def test_an_endless_answer_is_an_error_of_each_client(server):
    if not server.models:
        async with SandboxClient(server.url, deadline_s=1.0) as client:
            result = await client.run("1")
            assert result.outcome is Outcome.SANDBOX_ERROR and "AnswerTooLong" in result.stderr
    engine = ServerEngine(server.url)
    with pytest.raises((UserError, EngineError), match="longer than"):
        await engine.start()
    await engine.aclose()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("models", [b"[" * 200_000, b"[]", b"not JSON", b'{"data": [{"id": 1}]}'])
async def test_an_answer_of_another_shape_names_the_server(models):
    server = Server(models)
    engine = ServerEngine(server.url)
    with pytest.raises((UserError, EngineError), match=server.url):
        await engine.start()
    await engine.aclose()
    server.loop.call_soon_threadsafe(server.loop.stop)


async def test_an_answer_has_limits_of_bytes_and_time_and_is_not_compressed():
    server = Server()
    server.chunk, server.pause_s = b"x", 0.01
    with limit_answers(httpx.Client(trust_env=False), max_s=0.2) as client:
        with pytest.raises(AnswerTooLong, match=r"takes longer than 0\.2 s"):
            client.get(server.url)
    async with limit_answers(httpx.AsyncClient(trust_env=False), max_bytes=10) as client:
        with pytest.raises(AnswerTooLong, match="longer than 10 bytes"):
            async with client.stream("GET", server.url) as answer:
                async for _ in answer.aiter_lines():
                    pass
    bomb = gzip.compress(bytes(10**7))
    transport = httpx.MockTransport(
        lambda request: httpx.Response(200, headers={"Content-Encoding": "gzip"}, content=bomb)
    )
    with limit_answers(httpx.Client(transport=transport)) as client, pytest.raises(AnswerTooLong, match="compressed"):
        client.get("http://x")
    server.loop.call_soon_threadsafe(server.loop.stop)
