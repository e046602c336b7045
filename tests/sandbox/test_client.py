"""Tests of SandboxClient, which has the interface of LocalSandbox, over HTTP."""

import asyncio
import contextlib
import os
import signal
import socket

import pytest

from rstar_lab.common.outcomes import Outcome
from rstar_lab.hardware.processes import free_port
from rstar_lab.sandbox import Call, SandboxClient
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


async def test_answers_are_verified_by_the_service(client):
    assert await client.verify("so <answer>\\boxed{\\frac{2}{4}}</answer>", "1/2")
    assert not await client.verify("\\boxed{\\frac{2}{4}}", "1/2")


@pytest.mark.slow
async def test_an_unreachable_service_gives_a_failure_at_the_deadline():
    async with SandboxClient(f"http://127.0.0.1:{free_port()}", deadline_s=1.0) as client:
        result = await client.run("1")
    assert result.outcome is Outcome.SANDBOX_ERROR and "ConnectError" in result.stderr and client.retries > 0


@pytest.mark.slow
async def test_a_silent_service_gives_a_failure_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with SandboxClient(f"http://127.0.0.1:{silent.getsockname()[1]}", deadline_s=1.0) as client:
            assert (await client.run("1")).outcome is Outcome.QUEUE_TIMEOUT


@pytest.mark.parametrize("line", ["5", "[" * 100_000, "{}", '{"index": 7}', '{"index": 0, "outcome": "x"}', "<html>"])
async def test_an_answer_of_another_form_is_a_failure_of_the_service(line):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(line) + 1}\r\n\r\n{line}\n".encode())

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        async with SandboxClient(url, token="x") as client:
            result = await client.run("1", session="s")  # without a session it would be sent again
    assert result.outcome is Outcome.SANDBOX_ERROR and "not an answer of a sandbox service" in result.stderr


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
