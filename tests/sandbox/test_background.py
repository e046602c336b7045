"""Tests that preempted calls run in the background and end in time."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rstar_lab.sandbox.call_request import Answer
from rstar_lab.sandbox.runtime import protocol
from rstar_lab.sandbox.supervisor_pool import SupervisorConnection, SupervisorPool

GROUPS = Path("/sys/fs/cgroup")
LIMITS = protocol.Request(
    seed=None, session=False, stream=False, timeout_s=2.0, wall_slack_s=1.0, memory_mb=512, processes=256, open_files=64, file_mb=1,
    output_bytes=1024, value_bytes=1024,
)  # fmt: skip
LOOP = b"while True: pass"
BOMB = b"import os\nwhile True:\n try: os.fork()\n except OSError: pass"


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Run four busy processes per core while the block runs."""
    burners = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(4 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def cpu_groups(owner: int) -> list[Path]:
    """Return the folders of a sandbox's groups in the CPU hierarchy."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # another sandbox has removed a group meanwhile
            return [path.parent for path in GROUPS.rglob("cpu.idle") if f"rstar-lab-sandbox-{owner}" in str(path)]


def first_group(owner: int) -> Path:
    """Return the control group of the first supervisor in the CPU hierarchy."""
    for group in cpu_groups(owner):
        if group.name.split("-")[-2:] == ["bare", "1"]:
            return group
    pytest.skip("no control groups, or none that can be idle")


def in_background(owner: int) -> bool:
    return (first_group(owner) / "cpu.idle").read_text().strip() == "1"


def weighs_less(owner: int) -> bool:
    """Return whether the group's CPU weight is below that of an ordinary process."""
    files = {"cpu.shares": 1024, "cpu.weight": 100}
    return any(
        int((first_group(owner) / name).read_text()) < share
        for name, share in files.items()
        if (first_group(owner) / name).exists()
    )


def supervisors_outside(owner: int) -> int:
    """Return the number of supervisors that do not share the CPU time of their programs."""
    files = [
        group / name
        for group in cpu_groups(owner)
        if group.name.endswith("supervisors")
        for name in ("tasks", "cgroup.threads")
    ]
    return sum(len(file.read_text().split()) for file in files if file.exists())


async def preempted(connection: SupervisorConnection, limits: protocol.Request, code: bytes, wall_s: float) -> Answer:
    """Run a call that is preempted as soon as it is long."""

    def on_event(kind: bytes, _: bytes) -> None:
        if kind == protocol.LONG:
            connection.send(protocol.YIELD)

    return await connection.call(protocol.pack_request(limits, code, b""), wall_s, on_event)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "alone"), [(LOOP, True), (BOMB, False)], ids=["loop", "fork bomb"])
async def test_preempted_calls_end_in_time_on_a_busy_machine(code: bytes, alone: bool):
    pool = SupervisorPool(1)
    try:
        await pool.start()
        connection = await pool.start_supervisor("bare")
        assert pool._process is not None
        with busy():
            began = time.monotonic()
            call = asyncio.create_task(preempted(connection, LIMITS, code, 3.0))
            seen, light, left = False, False, 0
            while not call.done():
                seen |= in_background(pool._process.pid)
                light |= time.monotonic() - began > 0.5 and weighs_less(pool._process.pid)
                left = max(left, supervisors_outside(pool._process.pid))
                await asyncio.sleep(0.05)
            # Raises SupervisorUnresponsive if the supervisor could not end the call.
            result, _, dying = await call
            assert result.outcome == "timeout" and time.monotonic() - began < 5.5
            assert seen is alone, (
                "only a single process moves to the background, because many processes hold kernel locks"
            )
            assert light is alone, "many processes keep their weight, so that they end soon"
            assert left >= 1, (
                "the supervisor does not leave the group, whose CPU time a crowd or idle priority leaves it little of"
            )
            assert not (alone and dying), "a single process ends before the result is sent"
            result = (await connection.call(protocol.pack_request(LIMITS, b"print(1 + 1)", b""), 3.0)).result
            assert (result.outcome, result.stdout) == ("ok", "2\n")
        assert not in_background(pool._process.pid)
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def giving_way() -> AsyncIterator[tuple[SupervisorConnection, int]]:
    """Yield a supervisor and the owner of its control group; both cores are busy."""
    pool = SupervisorPool(1)
    try:
        await pool.start()
        connection = await pool.start_supervisor("bare")
        assert pool._process is not None
        with busy():
            yield connection, pool._process.pid
    finally:
        await pool.close()


@pytest.mark.slow
async def test_a_preempted_call_gets_an_eighth_of_its_limit_on_a_busy_machine():
    limits = LIMITS._replace(timeout_s=8.0)
    code = b"import time\nwhile time.process_time() < 0.8: pass\nprint('done')"
    async with giving_way() as (connection, _):
        result = (await preempted(connection, limits, code, 9.0)).result
    assert (result.outcome, result.stdout) == ("ok", "done\n")


@pytest.mark.slow
async def test_a_call_that_gets_its_slot_back_leaves_the_background():
    limits = LIMITS._replace(wall_slack_s=8.0)
    code = b"import time\nwhile time.process_time() < 1: pass\nprint('done')"
    async with giving_way() as (connection, owner):
        call = asyncio.create_task(preempted(connection, limits, code, 10.0))
        while not call.done() and not in_background(owner):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert not call.done(), "it needs more than the eighth of its limit"
        connection.send(protocol.RESUME)
        result = (await call).result
        assert not in_background(owner)
    assert (result.outcome, result.stdout) == ("ok", "done\n")


@contextlib.contextmanager
def freezer() -> Iterator[Path]:
    """Yield a control group whose processes cannot exit while its state is FROZEN."""
    group = GROUPS / "freezer" / f"test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no freezer of version 1, in which what is killed stays")
    try:
        yield group
    finally:
        (group / "freezer.state").write_text("THAWED")
        while (group / "tasks").read_text():
            time.sleep(0.01)
        group.rmdir()


@pytest.mark.slow
async def test_a_result_is_sent_before_slow_processes_have_ended():
    pool = SupervisorPool(1)
    try:
        await pool.start()
        connection = await pool.acquire("bare")
        assert pool._process is not None
        with freezer() as group:
            code = b"import os, time\nif os.fork() == 0: time.sleep(60)\n" + LOOP
            call = asyncio.create_task(connection.call(protocol.pack_request(LIMITS, code, b""), 3.0))
            tasks: list[str] = []
            while (
                len(tasks) < 2
            ):  # the program and its child; the supervisor and the namespace's init are in another group
                await asyncio.sleep(0.05)
                tasks = (first_group(pool._process.pid) / "tasks").read_text().split()
            (group / "tasks").write_text(tasks[-1])
            (group / "freezer.state").write_text("FROZEN")
            result, _, dying = await call
            assert (result.outcome, dying) == ("timeout", True)
            pool.release(connection)
            assert await pool.acquire("bare") is not connection
        async with asyncio.timeout(10):
            while connection.dying:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await pool.acquire("bare") is connection
        result, _, dying = await connection.call(protocol.pack_request(LIMITS, b"print(1 + 1)", b""), 3.0)
        assert (result.outcome, result.stdout, dying) == ("ok", "2\n", False)
    finally:
        await pool.close()


def cpu_limit(owner: int) -> float:
    """Return the CPUs that the first group may use."""
    group = first_group(owner)
    if (group / "cpu.max").exists():
        return int((group / "cpu.max").read_text().split()[0]) / 1e5
    return int((group / "cpu.cfs_quota_us").read_text()) / 1e5


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "cpus"), [(1, 1.1), (4, 0.9), (20, 0.8)])
async def test_the_cpu_limit_of_a_call_follows_its_threads(threads: int, cpus: float):
    """cpus: CPUs of one thread, else the share of the machine's CPUs."""
    pool = SupervisorPool(1)
    try:
        await pool.start()
        connection = await pool.acquire("bare")
        assert pool._process is not None
        await connection.call(protocol.pack_request(LIMITS, b"print(1)", b""), 3.0)  # creates the group
        code = f"import os\nfor _ in range({threads} - 1):\n if os.fork() == 0: break\nwhile True: pass".encode()
        call = asyncio.create_task(connection.call(protocol.pack_request(LIMITS, code, b""), 3.0))
        found = set()
        while not call.done():
            found.add(cpu_limit(pool._process.pid))
            await asyncio.sleep(0.02)
        expected = cpus if threads == 1 else cpus * len(os.sched_getaffinity(0))
        assert any(limit == pytest.approx(expected) for limit in found), found
        result = (await connection.call(protocol.pack_request(LIMITS, b"print(1 + 1)", b""), 3.0)).result
        assert result.outcome == "ok" and cpu_limit(pool._process.pid) <= 1.1
    finally:
        await pool.close()
