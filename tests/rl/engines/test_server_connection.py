"""Tests of the server engine's connections, with a scripted HTTP server."""

import asyncio
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from helpers.scripted_server import ScriptedServer
from helpers.tiny_models import make_model

from rstar_lab.common.errors import UserError
from rstar_lab.rl.engine import EngineError, Sampling
from rstar_lab.rl.engines import group as group_module
from rstar_lab.rl.engines.group import EngineGroup
from rstar_lab.rl.engines.server import ServerEngine, read_model_card

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


async def test_a_lost_server_gets_new_weights_later_if_another_works(tmp_path, monkeypatch):
    model, loaded = make_model(tmp_path / "model"), []

    class Working(ServerEngine):
        async def load_weights(self, path, version):
            loaded.append(version)

    lost, working = ServerEngine("http://127.0.0.1:9"), Working("http://127.0.0.1:9")
    lost.group = working.group = [lost, working]
    lost.lost, lost.context, working.context = True, 512, 256
    group, checked = EngineGroup([lost, working], tmp_path, 1), []
    assert group.context == 256, "both accept it"

    async def assert_parity(engine, *_):
        checked.append(engine)

    monkeypatch.setattr(group_module, "assert_parity", assert_parity)
    await group.load(model, 7)
    assert loaded == [7] and checked == [working]
    assert lost._weights and lost._weights[1] == 7 and lost.version == 0
    working.lost = True
    with pytest.raises(EngineError):
        await lost.load_weights(tmp_path / "weights.safetensors", 8)
    await group.aclose()


async def test_a_server_that_closes_all_connections_is_an_error():
    async with server(answers_per_connection=0) as (engine, connections):
        with pytest.raises(EngineError):
            await engine.scrape()
        assert len(connections) == 2


async def test_a_url_of_another_protocol_is_an_error_that_names_it():
    async with httpx.AsyncClient(base_url="ftp://node1:8000") as http:
        with pytest.raises(UserError, match=r"ftp://node1:8000 does not answer .* correct the URL"):
            await read_model_card(http, "ftp://node1:8000")


DEEP = b"[" * 100_000
COMPLETION = b'{"choices": [{"finish_reason": "stop", "token_ids": %s, "logprobs": {"token_logprobs": %s}}]}'


@pytest.fixture
async def scripted():
    server = ScriptedServer()
    await server.start()
    yield server
    server.die()


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"\xff", DEEP, b"[]", b'{"choices": []}', b'{"choices": [5]}', COMPLETION % (b'["x"]', b"[0]"),
        COMPLETION % (b"[-1]", b"[0]"), COMPLETION % (b"[1, 2]", b"[0]"), COMPLETION % (b"[1]", b'["x"]'),
    ],
)  # fmt: skip
async def test_a_completion_of_another_form_is_an_error_of_the_engine(scripted, answer):
    """It is not tried for ever: another answer of this server would have the same form."""
    engine = await scripted.engine()
    scripted.answers["/v1/completions"] = answer
    with pytest.raises(EngineError, match="not that of a vLLM server"):
        await asyncio.wait_for(engine.generate([1], Sampling(1, seed=0)), 20)
    scripted.answers["/v1/completions"] = b"data: {" + answer[1:]
    if answer[:1] == b"{":
        with pytest.raises(EngineError, match="not that of a vLLM server"):
            await asyncio.wait_for(engine.generate([1], Sampling(1, seed=0), lambda _: None), 20)
    for ask in (engine.score([1], [2]), engine.alternatives([1], 2, 3)):
        with pytest.raises(EngineError, match="not that of a vLLM server"):
            await ask
    await engine.aclose()


@pytest.mark.parametrize(
    "path, answer",
    [
        ("/v1/models", DEEP),
        ("/v1/models", b'{"data": [{"id": 5}]}'),
        ("/v1/models", b'{"data": [{"id": "m", "max_model_len": "x"}]}'),
        ("/metrics", b'vllm:x{a="1} x\n'),
    ],
)
async def test_a_server_that_describes_itself_in_another_form_is_one_error(scripted, path, answer):
    scripted.answers[path] = answer
    with pytest.raises(UserError):
        await scripted.engine()
