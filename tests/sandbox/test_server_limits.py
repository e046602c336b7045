"""Tests of the HTTP service's limits on size, number and time of requests."""

import asyncio
import contextlib
import json
import socket
import time
from typing import ClassVar

import httpx
import pytest

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import server
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.sandbox.launch import serving
from rstar_lab.sandbox.server import MAX_RESPONSE_BYTES, make_app
from rstar_lab.sandbox.service import Service


class EchoBackend:
    """A backend that returns the code of a call as its output."""

    gauges: ClassVar[dict[str, int]] = {"queue_depth": 0, "workers": 1}

    async def run(self, work, on_output=None) -> CallResult:
        return CallResult(Outcome.OK, work.code, "", None, 0.0)

    async def aclose(self) -> None:
        pass


def client_of(service: Service, **options) -> httpx.AsyncClient:
    app = make_app(service, time_limit_s=1.0, **options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.fixture
def echo_service():
    return Service(EchoBackend(), max_calls=10_000, max_bytes=1_000_000)


async def chunks(size: int, count: int):
    for _ in range(count):
        yield b" " * size


SHORT_HEADER_TIMEOUT = "import rstar_lab.sandbox.http_limits as limits; limits.HEADER_TIMEOUT_S = 0.5"
PARTIAL = b"GET /ping HTTP/1.1\r\nHost: loc"
COMPLETE = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
JSON = {"Content-Type": "application/json"}


async def test_a_batch_of_too_many_submissions_is_refused(echo_service):
    batch = {"type": "batch", "submissions": [{"type": "python", "solution": "1"}] * 5000}
    async with client_of(echo_service) as client:
        assert (await client.post("/run/batch", json=batch)).status_code == 422
    assert echo_service.calls == echo_service.bytes == 0


async def test_a_body_without_room_is_refused(echo_service):
    echo_service.reserve_bytes(900_000)
    async with client_of(echo_service) as client:
        reply = await client.post("/run", content=b" " * 200_000, headers=JSON)
        assert (reply.status_code, "retry-after" in reply.headers) == (429, True)
        assert echo_service.bytes == 900_000


async def test_chunked_bodies_are_counted(echo_service):
    echo_service.reserve_bytes(900_000)
    async with client_of(echo_service) as client:
        reply = await client.post("/run", content=chunks(50_000, 4), headers=JSON)
        assert reply.status_code == 429
    assert echo_service.bytes == 900_000


async def test_a_body_that_does_not_arrive_times_out(echo_service, monkeypatch):
    monkeypatch.setattr("rstar_lab.sandbox.access.BODY_TIMEOUT_S", 0.2)

    async def slow():
        yield b"{"
        await asyncio.sleep(60)

    sent: list[dict] = []
    app = make_app(echo_service, time_limit_s=1.0)
    body = slow()

    async def receive():
        return {"type": "http.request", "body": await anext(body), "more_body": True}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/run", "raw_path": b"/run", "query_string": b"", "headers": [
            (b"content-type", b"application/json"), (b"host", b"localhost")], "http_version": "1.1", "scheme": "http",
        "server": ("localhost", 80), "client": ("localhost", 1), "root_path": "",
    }  # fmt: skip
    async with asyncio.timeout(5):
        await app(scope, receive, send)
    assert sent[0]["status"] == 408 and echo_service.bytes == 0


@pytest.mark.slow
async def test_the_output_of_a_response_is_limited():
    service = Service(EchoBackend(), max_calls=10_000, max_bytes=10**9)
    code = "x" * (MAX_RESPONSE_BYTES // 16)
    batch = {"type": "batch", "submissions": [{"type": "python", "solution": code}] * 20}
    async with client_of(service) as client:
        reply = await client.post("/run/batch", json=batch)
        judged = await client.post("/judge/batch", json=batch)
    results = reply.json()["results"]
    assert len(reply.content) <= MAX_RESPONSE_BYTES + 10_000
    assert {result["outcome"] for result in results} == {"ok"}
    assert [result["stdout"] == code for result in results].count(True) == 8
    assert "output left out" in results[-1]["stderr"]
    assert all(result["success"] for result in judged.json()["results"])


@pytest.mark.slow
def test_invalid_bytes_do_not_multiply_the_size_of_a_response(http):
    code = "import os\nfor fd in (1, 2): os.write(fd, b'\\xff' * (1 << 20))"
    reply = http.post("/run", json={"type": "python", "solution": code})
    assert reply.json()["outcome"] == "ok"
    assert len(reply.content) < 4.1 * 2**20


@pytest.mark.slow
def test_small_outputs_of_any_bytes_are_complete(http):
    code = "import os\nos.write(1, b'\\xff' * 9999 + '\\N{GRINNING FACE}'.encode() * 9999)"
    reply = http.post("/run", json={"type": "python", "solution": code}).json()
    assert reply["stdout"] == "\\xff" * 9999 + "\N{GRINNING FACE}" * 9999


@pytest.mark.slow
def test_a_connection_that_sends_half_of_its_headers_is_closed():
    with serving("serve", "--no-token", "--port", "0", "--workers", "1", prepare=SHORT_HEADER_TIMEOUT) as ready:
        host, port = ready["url"].removeprefix("http://").split(":")
        for complete, partial in ((b"", b""), (b"", PARTIAL), (COMPLETE, PARTIAL)):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(complete)
                if complete:
                    while b"pong" not in (received := connection.recv(4096)):
                        assert received
                connection.sendall(partial)
                start = time.monotonic()
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(4096) == b""
                assert time.monotonic() - start < 5
        assert json.loads(httpx.get(f"{ready['url']}/ping", trust_env=False).text) == "pong"


async def test_a_client_that_does_not_read_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(server, "MAX_RESPONSE_BYTES", 1_000_000)
    service = Service(EchoBackend(), max_calls=100, max_bytes=10**9)
    service.admit(51)
    lines = server.result_lines(service, [Call(""), *[Call("x" * 100_000)] * 50])
    first = await anext(lines)
    await asyncio.sleep(0.1)  # all other calls end before the first result is sent
    results = [json.loads(line) for line in (first + b"".join([part async for part in lines])).splitlines()]
    complete = [result for result in results if result["stdout"]]
    assert len(results) == 51 and len(complete) <= 10
    assert {result["outcome"] for result in results} == {"ok"}
    assert sum("output left out" in result["stderr"] for result in results) == 50 - len(complete)


async def test_unread_responses_count_towards_the_bytes_that_are_held():
    service = Service(EchoBackend(), max_calls=10, max_bytes=10_000)
    app = make_app(service, time_limit_s=1.0)
    body = json.dumps({"type": "python", "solution": "x" * 3000}).encode()
    reading = asyncio.Event()

    async def post(wait_to_read: bool) -> int:
        sent = []

        async def receive():
            if not sent:
                sent.append({"status": 0})
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.sleep(60)

        async def send(message):
            sent.append(message)
            if wait_to_read:
                await reading.wait()

        scope = {
            "type": "http", "method": "POST", "path": "/run", "raw_path": b"/run", "query_string": b"", "scheme": "http",
            "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")], "http_version": "1.1",
            "server": ("localhost", 80), "client": ("localhost", 1), "root_path": "",
        }  # fmt: skip
        await app(scope, receive, send)
        return next(message["status"] for message in sent[1:] if "status" in message)

    slow = asyncio.create_task(post(wait_to_read=True))
    await asyncio.sleep(0.2)
    assert service.bytes > 6000
    assert await post(wait_to_read=False) == 429
    reading.set()
    assert await slow == 200
    assert service.bytes == 0
    assert await post(wait_to_read=False) == 200


@pytest.mark.slow
async def test_a_client_that_does_not_read_is_disconnected():
    prepare = "import rstar_lab.sandbox.http_limits as limits; limits.READ_TIMEOUT_S = 0.5"
    with serving("serve", "--no-token", "--port", "0", "--workers", "1", prepare=prepare) as ready:
        port = int(ready["url"].rsplit(":", 1)[1])
        batch = {"type": "batch", "submissions": [{"type": "python", "solution": "print('x' * 1_000_000)"}] * 30}
        body = json.dumps(batch).encode()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            head = f"POST /run/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            connection.sendall(f"{head}\r\n\r\n".encode() + body)
            while not connection.recv(1, socket.MSG_PEEK):
                pass
            await asyncio.sleep(2.0)
            connection.settimeout(10)
            got = 0
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(1 << 20):
                    got += len(part)
            assert got < 30_000_000
