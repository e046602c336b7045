"""Tests of calls over a real Redis: each gets exactly one result, also when processes are killed."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import aclosing, asynccontextmanager

import httpx
import pytest

from benchmarks.redis_server import temporary_redis
from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Call, transport
from rstar_lab.sandbox.launch import serving
from rstar_lab.sandbox.redis_backend import RedisBackend
from rstar_lab.sandbox.wire import SessionEnd, SessionFork, Verification, dumps, work_to_dict

pytestmark = pytest.mark.slow


def worker(redis, workers=1):
    return serving("worker", "--workers", str(workers), "--time-limit", "5", redis=redis.url)


@asynccontextmanager
async def backend(redis, wait_s=100.0):
    async with aclosing(await RedisBackend(redis.url, wait_s=wait_s).start()) as client:
        yield client


def numbered(count, sleep_s=0.0):
    return [Call(f"import time\ntime.sleep({sleep_s})\nprint({number})") for number in range(count)]


async def run_all(client, calls):
    results = await asyncio.gather(*map(client.run, calls))
    return [result.stdout for result in results], Counter(result.outcome for result in results)


def all_right(count):
    return [f"{number}\n" for number in range(count)], {Outcome.OK: count}


async def assert_nothing_is_left(client):
    """Assert that no call, result or waiting client is left. A worker removes an entry after it has sent its result."""
    assert client.pending == {}
    async with asyncio.timeout(10):
        while await client.redis.xlen(transport.CALLS):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert (await client.redis.xpending(transport.CALLS, transport.GROUP))["pending"] == 0
    await asyncio.sleep(0.1)
    assert await client.redis.xlen(client.results) <= 1


@pytest.fixture(scope="module")
def calm():
    """Start Redis and a worker with two slots, for tests that kill nothing."""
    if shutil.which("redis-server") is None:
        pytest.skip("REDIS IS NOT TESTED: redis-server is not installed (`make services` installs it where it may)")
    with temporary_redis() as redis, worker(redis, 2):
        yield redis


async def test_results_and_errors_are_returned_over_redis(calm):
    async with backend(calm) as client:
        assert client.gauges["workers"] == 2
        assert await run_all(client, numbered(200)) == all_right(200)
        broken = await client.run(Call("1/0"))
        assert broken.outcome is Outcome.EXCEPTION and "ZeroDivisionError" in broken.stderr
        assert (await client.run(Call("input()[::-1]", "\udcffab", timeout_s=3))).outcome is Outcome.OK
        assert (await client.run(Call("1", timeout_s=1e9))).outcome is Outcome.INVALID_ARGUMENTS
        assert (await client.run(Verification("<answer>\\boxed{0.5}</answer>", "1/2"))).value == "True"
        await assert_nothing_is_left(client)


async def test_calls_of_a_session_go_to_one_worker(calm):
    async with backend(calm) as client:
        await client.run(Call("x = 41", session="a"))
        assert (await client.run(Call("x + 1", session="a"))).value == "42"
        fork = await client.run(SessionFork("a", 2))
        copies = json.loads(fork.value or "[]")
        assert [(await client.run(Call("x", session=copy))).value for copy in copies] == ["41", "41"]
        assert (await client.run(SessionEnd("a"))).outcome is Outcome.OK
        for copy in copies:
            assert (await client.run(SessionEnd(copy))).outcome is Outcome.OK
        assert (await client.run(Call("x", session="a"))).outcome is Outcome.EXCEPTION


async def test_a_session_of_a_dead_worker_is_restarted_with_a_note(redis):
    async with backend(redis) as client:
        with worker(redis) as first:
            await client.refresh_workers()
            assert (await client.run(Call("x = 41", session="a"))).outcome is Outcome.OK
            running = asyncio.create_task(client.run(Call("import time\ntime.sleep(4)", session="a")))
            await asyncio.sleep(0.5)
            os.kill(first["pid"], signal.SIGKILL)
            died = await running
        assert died.outcome is Outcome.SANDBOX_ERROR and "has died" in died.stderr
        with worker(redis):
            again = await client.run(Call("print('x' in globals())", session="a"))
        assert again.stdout == "False\n" and "session restarted, earlier state is gone" in again.stderr


async def test_the_service_over_redis_gives_the_same_results(calm):
    with serving("serve", "--no-token", "--port", "0", redis=calm.url) as ready:
        async with httpx.AsyncClient(base_url=ready["url"], timeout=60, trust_env=False) as http:
            assert (await http.get("/status")).json() == {"queue": 0, "num_workers": 2}
            python = {"type": "python", "solution": "print(input())", "input": "a", "expected_output": "a"}
            math = {"type": "math", "solution": "\\frac12", "expected_output": "0.5"}
            endless = {"type": "python", "solution": "import time\ntime.sleep(60)"}
            reply = await http.post("/run/long-batch", json={"submissions": [python, math, endless, python]})
            results = reply.json()["results"]
        assert [result["success"] for result in results] == [True, True, False, True]
        assert [result["reason"] for result in results] == ["", "", "worker_timeout", ""]


async def test_calls_of_a_killed_worker_go_to_another(redis):
    with worker(redis) as first, worker(redis):
        async with backend(redis) as client:
            running = asyncio.create_task(run_all(client, numbered(40, sleep_s=0.6)))
            await asyncio.sleep(0.5)
            os.kill(first["pid"], signal.SIGKILL)
            assert await running == all_right(40)
            await assert_nothing_is_left(client)


async def test_a_restart_of_redis_loses_no_calls(redis, caplog):
    with worker(redis):
        async with backend(redis) as client:
            running = asyncio.create_task(run_all(client, numbered(60, sleep_s=1.2)))
            await asyncio.sleep(1)
            redis.kill()
            during = asyncio.create_task(client.run(Call("print('asked while it was down')")))
            await asyncio.sleep(1)
            redis.start()
            assert await running == all_right(60)
            assert (await during).stdout == "asked while it was down\n"
            assert "has lost" not in caplog.text
            await assert_nothing_is_left(client)


async def test_lost_calls_are_sent_again_without_append_only(redis, caplog):
    with temporary_redis(append_only=False) as forgetful, worker(forgetful):
        async with backend(forgetful) as client:
            running = asyncio.create_task(run_all(client, numbered(40, sleep_s=2.0)))
            await asyncio.sleep(1)
            forgetful.kill()
            forgetful.start()
            assert await running == all_right(40)
            assert "was it restarted without `appendonly yes`?" in caplog.text
            await assert_nothing_is_left(client)


async def test_a_stopped_worker_finishes_its_calls(redis):
    with worker(redis) as first:
        async with backend(redis) as client:
            running = asyncio.create_task(run_all(client, numbered(3, sleep_s=1)))
            await asyncio.sleep(0.7)
            os.kill(first["pid"], signal.SIGTERM)
            assert await running == all_right(3)
            assert await asyncio.to_thread(first["wait"], 30) == 0
            assert await transport.live_workers(client.redis) == {}
            await assert_nothing_is_left(client)


async def test_without_workers_a_call_times_out_in_the_queue(redis):
    async with backend(redis, wait_s=1.0) as client:
        result = await client.run(Call("print(1)"))
        assert result.outcome is Outcome.QUEUE_TIMEOUT and "no worker is running" in result.stderr
        await assert_nothing_is_left(client)


async def test_a_cancelled_call_is_removed_from_redis(redis):
    async with backend(redis) as client:
        running = asyncio.create_task(client.run(Call("print(1)")))
        while await client.redis.xlen(transport.CALLS) == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await assert_nothing_is_left(client)


async def test_only_the_first_acknowledgement_publishes_a_result(redis):
    client = transport.connect(redis.url)
    await transport.make_group(client, "calls")
    entry = await client.xadd("calls", {"body": "x"})
    await client.xreadgroup(transport.GROUP, "somebody", {"calls": ">"})
    answers = [
        await client.eval(transport.PUBLISH, 2, "calls", "results", transport.GROUP, entry, "id", who, 1000, "")
        for who in "ab"
    ]
    assert answers == [1, 0]
    assert [fields[b"body"] for _, fields in await client.xrange("results")] == [b"a"]
    await client.aclose()


async def test_a_call_that_kills_workers_is_abandoned_after_three(redis):
    """After three dead workers the call must not be sent to a fourth."""
    async with backend(redis) as client:
        running = asyncio.create_task(client.run(Call("print(1)")))
        taken = []
        while not taken:
            taken = await client.redis.xreadgroup(transport.GROUP, "dead", {transport.CALLS: ">"}, block=100)
        entry = taken[0][1][0][0]
        await client.redis.xclaim(
            transport.CALLS, transport.GROUP, "dead", 0, [entry], idle=60_000, retrycount=transport.MAX_DELIVERIES
        )
        with worker(redis):
            result = await running
        assert result.outcome is Outcome.SANDBOX_ERROR and "3 workers died" in result.stderr


async def test_invalid_entries_do_not_stop_a_worker(calm):
    good = {"id": "other:1", "client": "other", "wait": "5", "body": dumps(work_to_dict(Call("print(1)")))}
    wrong = [
        {"x": "y"}, {**good, "wait": "soon"}, {**good, "wait": "nan"}, {**good, "client": b"\xff"}, {**good, "body": b"\xff"},
        {**good, "body": "[]"}, {**good, "body": "[" * 100_000}, {**good, "body": '{"kind": "code"}'},
        {**good, "body": '{"kind": "math", "answer": 1}'}, {**good, "body": '{"code": "1", "timeout_s": "x"}'},
    ]  # fmt: skip
    async with backend(calm) as client:
        for fields in wrong:
            await client.redis.xadd(transport.CALLS, fields)
        assert (await client.run(Call("print(2)"))).stdout == "2\n"
        results = await client.redis.xrange(transport.results_of("other"))
        outcomes = [json.loads(fields[b"body"])["outcome"] for _, fields in results]
        assert outcomes == ["invalid_arguments"] * 6
        await assert_nothing_is_left(client)


async def test_unexpected_results_are_ignored(calm):
    async with backend(calm) as client:
        for fields in ({"x": "y"}, {"id": "no:1", "body": "{}"}, {"id": b"\xff", "body": "x"}):
            await client.redis.xadd(client.results, fields)
        assert (await client.run(Call("print(2)"))).stdout == "2\n"


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:{port}/0", "redis://:wrong@127.0.0.1:{port}/0", "redis://:x@127.0.0.1:1/0", "nonsense"]
)
async def test_redis_errors_name_the_server_without_the_password(redis, url):
    with pytest.raises(UserError) as error:
        await RedisBackend(url.format(port=redis.port), wait_s=1).start()
    assert "redis://:PASSWORD@HOST" in str(error.value) or "127.0.0.1" in str(error.value)
    assert "wrong@" not in str(error.value)


async def test_a_redis_without_password_is_rejected(redis):
    admin = transport.connect(redis.url)
    await admin.config_set("requirepass", "")
    with pytest.raises(UserError, match="does not require a password"):
        await RedisBackend(f"redis://127.0.0.1:{redis.port}/0", wait_s=1).start()
    await admin.aclose()


@pytest.fixture
def cable():
    """Create a network namespace with a link to this one. Yields (command prefix, address here, cut(bool))."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("A CUT NETWORK IS NOT TESTED: it needs root and iproute2")
    name, subnet = f"rl{os.getpid()}", f"10.213.{os.getpid() % 250}"
    commands = [
        f"ip netns add {name}",
        f"ip link add {name}a type veth peer name {name}b netns {name}",
        f"ip addr add {subnet}.1/30 dev {name}a",
        f"ip link set {name}a up",
        f"ip -n {name} addr add {subnet}.2/30 dev {name}b",
        f"ip -n {name} link set {name}b up",
        f"ip -n {name} link set lo up",
    ]
    try:
        for command in commands:
            if subprocess.run(command.split(), capture_output=True).returncode:
                pytest.skip(f"A CUT NETWORK IS NOT TESTED: `{command}` is not allowed here")
        yield (
            ["ip", "netns", "exec", name],
            f"{subnet}.1",
            lambda cut: subprocess.run(["ip", "link", "set", f"{name}a", "down" if cut else "up"], check=True),
        )
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


async def test_a_network_partition_loses_no_calls(cable):
    """The disconnected worker counts as dead. Its late results after the reconnect are ignored."""
    if shutil.which("redis-server") is None:
        pytest.skip("REDIS IS NOT TESTED: redis-server is not installed")
    prefix, address, cut = cable
    with temporary_redis(bind=f"127.0.0.1 {address}") as redis:
        far = serving("worker", "--workers", "1", "--time-limit", "5", redis=redis.url, prefix=prefix)
        with far, worker(redis):
            async with backend(redis) as client:
                running = asyncio.create_task(run_all(client, numbered(60, sleep_s=1.2)))
                await asyncio.sleep(1)
                cut(True)
                await asyncio.sleep(8)
                cut(False)
                assert await running == all_right(60)
                deadline = time.monotonic() + 30
                while len(await transport.live_workers(client.redis)) < 2:
                    assert time.monotonic() < deadline, "the disconnected worker did not reconnect"
                    await asyncio.sleep(0.2)
                assert await run_all(client, numbered(40)) == all_right(40)
                await assert_nothing_is_left(client)


async def test_members_that_no_worker_wrote_are_ignored(redis):
    client = await RedisBackend(redis.url, wait_s=100.0).start()
    try:
        now = await transport.now_ms(client.redis)
        await client.redis.zadd(
            transport.WORKERS, {name: now for name in (b"noise", b"x|y", b"\xff\xfe|2", b"|", b"real|3")}
        )
        assert await transport.live_workers(client.redis) == {"real|3": 3}
    finally:
        await client.aclose()
