"""Tests of the server engine's connections, with a scripted HTTP server."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from rstar_lab.rl.engine import EngineError
from rstar_lab.rl.engines.server import ServerEngine

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n#\n"


@asynccontextmanager
async def server(answers_per_connection: int):
    """Yield (engine, connections): a server that closes each connection after that number of answers, without notice."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        for _ in range(answers_per_connection):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
            connections[-1] += 1
        with suppress(asyncio.CancelledError, asyncio.IncompleteReadError):
            if answers_per_connection:
                await reader.readuntil(b"\r\n\r\n")  # a request that gets no answer
        writer.transport.abort()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        engine = ServerEngine(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        yield engine, connections
        await engine.aclose()


async def test_a_request_on_a_connection_that_the_server_closes_is_sent_again():
    async with server(answers_per_connection=1) as (engine, connections):
        for _ in range(3):
            await engine.scrape()
        assert connections == [1, 1, 1]


async def test_a_server_that_closes_all_connections_is_an_error():
    async with server(answers_per_connection=0) as (engine, connections):
        with pytest.raises(EngineError):
            await engine.scrape()
        assert len(connections) == 2
