"""Tests of SandboxClient, which has the interface of LocalSandbox, over HTTP."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import httpx
import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.hardware.processes import free_port
from rstar_lab.sandbox import Call, CallResult, SandboxClient
from rstar_lab.sandbox.client import retry_after
from rstar_lab.sandbox.launch import serving


@pytest.fixture
async def client(service):
    async with SandboxClient(service["url"], deadline_s=60) as client:
        yield client


async def test_a_result_has_all_fields(client):
    result = await client.run("import sys\nprint(input())\nprint('e', file=sys.stderr)\n[1, 2]", "in")
    assert (result.outcome, result.stdout, result.stderr, result.value) == (Outcome.OK, "in\n", "e\n", "[1, 2]")
    assert result.duration_s > 0 and result.queue_s >= 0


async def test_run_many_keeps_order_and_seeds(client):
    calls = [Call(f"import random\nprint({number}, random.random())", seed=number % 3) for number in range(150)]
    results = await client.run_many(calls)
    assert [result.stdout.split()[0] for result in results] == [str(number) for number in range(150)]
    assert len({result.stdout.split()[1] for result in results}) == 3


async def test_limits_of_a_call_are_sent_to_the_service(client):
    slow, greedy = await client.run_many(
        [Call("import time\ntime.sleep(60)", timeout_s=0.5), Call("x = bytearray(10**9)\nprint(len(x))", memory_mb=100)]
    )
    assert slow.outcome is Outcome.TIMEOUT and slow.duration_s < 10
    assert greedy.outcome is Outcome.MEMORY


async def test_a_session_keeps_its_state_until_it_is_closed(client):
    assert (await client.run("x = 41", session="test_client")).outcome is Outcome.OK
    assert (await client.run("x + 1", session="test_client")).value == "42"
    await client.close_session("test_client")
    again = await client.run("x", session="test_client")
    assert again.outcome is Outcome.EXCEPTION and "NameError" in again.stderr
    await client.close_session("test_client")


async def test_output_that_is_not_utf8_is_returned(client):
    shown = await client.run("import sys\nprint(ascii(sys.stdin.buffer.read()))", "a\udcffb\x00")
    assert shown.outcome is Outcome.OK and shown.stdout.startswith("b'a")
    assert (await client.run("'\ud800'")).outcome is not Outcome.SANDBOX_ERROR


async def test_an_invalid_call_does_not_affect_others_of_its_batch(client):
    wrong, right = await asyncio.gather(client.run("1", timeout_s=-1.0), client.run("print(1)"), return_exceptions=True)
    assert isinstance(wrong, ValueError) and "timeout_s" in str(wrong)
    assert right.stdout == "1\n"


@pytest.mark.slow
async def test_an_unreachable_service_gives_a_failure_at_the_deadline():
    async with SandboxClient(f"http://127.0.0.1:{free_port()}", deadline_s=1.0) as client:
        result = await client.run("1")
    assert result.outcome is Outcome.SANDBOX_ERROR and "ConnectError" in result.stderr and client.retries > 0


@contextlib.asynccontextmanager
async def answering(head: bytes, body: bytes = b"", drip_s: float = 0.0) -> AsyncIterator[str]:
    """Yield the URL of a server that sends this answer to each request, and after it a space every `drip_s` seconds."""

    async def serve(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while head:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(head + body)
                while drip_s:
                    writer.write(b" ")
                    await asyncio.sleep(drip_s)
            await asyncio.sleep(60)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


def head(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body))


@pytest.mark.parametrize("drip_s", [0.0, 0.1])
async def test_a_silent_or_slow_service_gives_a_failure_at_the_deadline(drip_s):
    async with answering(head(b" " * 10_000) if drip_s else b"", drip_s=drip_s) as url, asyncio.timeout(10):
        async with SandboxClient(url, token="x", deadline_s=0.5, connections=1) as client:
            for _ in range(2):  # the request of the first call does not keep the connection
                assert (await client.run("1")).outcome in INFRASTRUCTURE_FAILURES
            async for item in client.stream("1"):
                assert isinstance(item, CallResult) and item.outcome in INFRASTRUCTURE_FAILURES


LINE = '{"index": 0, "outcome": "ok", "stdout": "", "stderr": "", "value": null, "duration_s": 0}'
FOREIGN = ["5", "[" * 100_000, "{}", LINE.replace("0", "7", 1), LINE.replace("ok", "won"), "<html>", LINE[:-1]]
FOREIGN += [
    LINE.replace('""', "5", 1),
    LINE.replace("null", "[1]"),
    LINE.replace("0}", "NaN}"),
    LINE.replace("index", "i"),
]


@pytest.mark.parametrize(
    ("status", "body"), [*((200, line) for line in FOREIGN), (404, "[" * 100_000), (403, ""), (301, "x")]
)
async def test_another_server_is_one_error_that_names_it(status, body):
    async with answering(head(body.encode() + b"\n", status), body.encode() + b"\n") as url:
        async with SandboxClient(url, token="x") as client, asyncio.timeout(10):
            with pytest.raises(UserError, match=f"^{url}: n(ot an answer of a|o) sandbox service"):
                await client.run("1")
            with pytest.raises(UserError, match=f"^{url}: n(ot an answer of a|o) sandbox service"):
                await anext(client.stream("1"))
            assert client.retries == 0


@pytest.mark.parametrize(("status", "body"), [(500, b"[" * 100_000), (502, b"<html>"), (200, b"")])
async def test_what_may_be_transient_is_repeated_and_logged_once(status, body, caplog):
    async with answering(head(body, status), body) as url, SandboxClient(url, token="x", deadline_s=1.0) as client:
        result = await client.run("1")
    assert result.outcome is Outcome.SANDBOX_ERROR and url in result.stderr and client.retries > 1
    assert len(caplog.messages) == 1 and url in caplog.messages[0]


@pytest.mark.parametrize(("header", "seconds"), [("0", 0), ("7", 7), ("3600", 60), ("-1", 0), ("soon", 0), ("", 0)])
def test_a_service_delays_its_client_by_a_minute_at_most(header, seconds):
    assert retry_after(httpx.Response(503, headers={"Retry-After": header})) == seconds


async def test_a_cancelled_call_is_ended_on_the_service(client):
    running = asyncio.create_task(client.run("import time\ntime.sleep(30)"))
    await asyncio.sleep(0.3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await client.run("print(1)")).stdout == "1\n"


@pytest.mark.slow
async def test_calls_are_answered_after_a_restart_of_the_service():
    port = str(free_port())
    with contextlib.ExitStack() as first:
        ready = first.enter_context(serving("serve", "--port", port, "--workers", "2"))
        async with SandboxClient(ready["url"], deadline_s=120) as client:
            calls = [Call(f"import time\ntime.sleep(0.05)\nprint({number})") for number in range(80)]
            running = asyncio.create_task(client.run_many(calls))
            await asyncio.sleep(0.7)
            os.kill(ready["pid"], signal.SIGKILL)
            await asyncio.to_thread(first.close)
            with serving("serve", "--port", port, "--workers", "2"):
                results = await running
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(80)]
    assert client.retries > 0
