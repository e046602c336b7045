"""Tests of forked sessions: copies of a live interpreter."""

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Limits, LocalSandbox, SandboxClient
from rstar_lab.sandbox.call import ForkError
from rstar_lab.sandbox.runtime.forked_program import AdoptedProgram
from rstar_lab.sandbox.runtime.program import REPORT_BYTES
from rstar_lab.sandbox.runtime.protocol import Copy

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox():
    async with LocalSandbox(Limits(timeout_s=5, wall_slack_s=10, memory_mb=256), workers=2) as sandbox:
        yield sandbox


@contextlib.asynccontextmanager
async def session(sandbox: LocalSandbox, name: str, code: str):
    """Run the first cell of a session; close it and all its copies at the end."""
    assert (await sandbox.run(code, session=name)).outcome == Outcome.OK
    yield name
    for other in [live for live in sandbox._sessions._live if live.startswith(name)]:
        await sandbox.close_session(other)


async def values(sandbox: LocalSandbox, names: list[str], code: str) -> list[str | None]:
    return [(await sandbox.run(code, session=name)).value for name in names]


@pytest.mark.slow
async def test_copies_have_the_state_and_are_independent(sandbox):
    async with session(sandbox, "state", "import math\nx = [1]\ndef grow(n):\n    x.append(n)\n    return x") as name:
        copies = await sandbox.fork(name, 20)
        assert len(set(copies)) == 20
        grown = await asyncio.gather(
            *(sandbox.run(f"grow({i})", session=copy) for i, copy in enumerate(copies)), sandbox.run("x", session=name)
        )
        assert [result.value for result in grown] == [f"[1, {i}]" for i in range(20)] + ["[1]"]
        assert await values(sandbox, copies, "len(x), math.pi > 3, _") == [f"(2, True, [1, {i}])" for i in range(20)]


@pytest.mark.slow
async def test_a_copy_can_be_forked_again(sandbox):
    async with session(sandbox, "tree", "path = 'root'") as name:
        nodes = [name]
        for depth in range(3):
            children = [child for node in nodes for child in await sandbox.fork(node, 2)]
            for number, child in enumerate(children):
                await sandbox.run(f"path += '/{depth}.{number}'", session=child)
            nodes = children
        assert (await values(sandbox, nodes, "path"))[-1] == "'root/0.1/1.3/2.7'"


async def test_copies_outlive_the_original_and_end_with_the_last_session(sandbox):
    async with session(sandbox, "warm", "1"):
        pass  # the first session starts the process that all later ones are forked from
    before = set(psutil.Process(os.getpid()).children(recursive=True))
    async with session(sandbox, "first", "x = 1") as name:
        copies = await sandbox.fork(name, 3)
        await sandbox.close_session(name)
        assert await values(sandbox, copies, "x") == ["1"] * 3
        with pytest.raises(ValueError, match="not live"):
            await sandbox.fork(name, 1)
        deeper = await sandbox.fork(copies[0], 2)
        for copy in copies:
            await sandbox.close_session(copy)
        assert await values(sandbox, deeper, "x + 1") == ["2"] * 2
    deadline = time.monotonic() + 10
    while (left := set(psutil.Process(os.getpid()).children(recursive=True)) - before) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    assert not left


async def test_each_copy_has_its_own_working_folder_with_the_files(sandbox):
    code = "import os\nos.mkdir('d')\nopen('d/a', 'w').write('1')\nos.symlink('d/a', 'l')"
    async with session(sandbox, "files", code) as name:
        copies = await sandbox.fork(name, 2)
        await sandbox.run("open('d/a', 'w').write('2')", session=copies[0])
        assert await values(sandbox, [name, *copies], "open('l').read()") == ["'1'", "'2'", "'1'"]


async def test_copies_have_different_random_numbers_unless_seeded(sandbox):
    draw = "import random, numpy\nrandom.random(), numpy.random.rand()"
    async with session(sandbox, "random", draw) as name:
        copies = await sandbox.fork(name, 4)
        assert len(set(await values(sandbox, [name, *copies], draw))) == 5
        assert len({(await sandbox.run(draw, session=copy, seed=3)).value for copy in copies}) == 1


ENDINGS = {
    "x = []\nwhile True: x.append(bytearray(1 << 20))": Outcome.MEMORY,
    "import os\nos._exit(1)": Outcome.KILLED,
    "while True: print('x' * 999)": Outcome.OUTPUT_LIMIT,
    "import time\ntry: time.sleep(99)\nexcept BaseException: time.sleep(99)": Outcome.TIMEOUT,
}


@pytest.mark.slow
@pytest.mark.parametrize("code", ENDINGS)
@pytest.mark.parametrize("of", ["a copy", "the original"])
async def test_the_end_of_one_interpreter_does_not_end_the_others(sandbox, of, code):
    async with session(sandbox, "ends", "x = 1") as name:
        copies = await sandbox.fork(name, 2)
        ended = copies[0] if of == "a copy" else name
        others = [copy for copy in (name, *copies) if copy != ended]
        result = await sandbox.run(code, session=ended, timeout_s=2.0)
        assert result.outcome == ENDINGS[code] and "has ended" in result.stderr
        assert await values(sandbox, others, "x") == ["1", "1"]
        restarted = await sandbox.run("x", session=ended)
        assert restarted.outcome == Outcome.EXCEPTION and "earlier state is gone" in restarted.stderr


async def test_an_interrupted_copy_keeps_its_state(sandbox):
    async with session(sandbox, "interrupt", "x = 1") as name:
        (copy,) = await sandbox.fork(name, 1)
        assert (await sandbox.run("x = 2\nwhile True: pass", session=copy, timeout_s=0.5)).outcome == Outcome.TIMEOUT
        assert await values(sandbox, [copy, name], "x") == ["2", "1"]


@pytest.mark.slow
async def test_children_of_an_ended_copy_are_killed(sandbox):
    async with session(sandbox, "daemons", "x = 1") as name:
        copies = await sandbox.fork(name, 2)
        daemon = "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(99)\n os._exit(0)"
        await sandbox.run(daemon, session=copies[0])
        count = "import os\nsum(name.isdigit() for name in os.listdir('/proc'))"
        (before,) = await values(sandbox, [copies[1]], count)
        await sandbox.close_session(copies[0])
        await asyncio.sleep(1.0)
        (after,) = await values(sandbox, [copies[1]], count)
        assert int(after or 0) <= int(before or 0) - 2


HOSTILE = {
    "the channel is closed": "import os\nos.close(3)",
    "nobody reads the channel": "import os\nos.dup2(os.open('/dev/null', 0), 3)",
    "no descriptors are left": "import os\nx = []\nwhile True:\n try: x.append(os.open('/dev/null', 0))\n except OSError: break",
    "fork is replaced": "import os\nos.fork = lambda: 77",
    "a handler raises in the fork": "import os\nos.register_at_fork(after_in_child=lambda: os._exit(0))",
    "the children of the fork hang": "import os, time\nos.register_at_fork(after_in_child=lambda: time.sleep(99))",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_failed_fork_does_not_affect_other_sessions(sandbox, name):
    await sandbox.run(HOSTILE[name], session=name)
    with pytest.raises((ForkError, ValueError)):
        await sandbox.fork(name, 2)
    assert (await sandbox.run("print(1)")).stdout == "1\n"
    async with session(sandbox, "honest", "x = 1") as honest:
        assert await values(sandbox, await sandbox.fork(honest, 2), "x") == ["1", "1"]
    await sandbox.close_session(name)


async def test_impossible_forks_are_refused(sandbox):
    with pytest.raises(ValueError, match="not live"):
        await sandbox.fork("unknown", 1)
    with pytest.raises(ValueError, match="n: 0"):
        await sandbox.fork("unknown", 0)


@pytest.mark.slow
async def test_a_fork_is_refused_before_calls_run_out_of_memory():
    async with LocalSandbox(Limits(timeout_s=5.0), workers=2) as sandbox:
        await sandbox.run("x = bytearray(300 << 20)", session="large")
        assert sandbox._pool and sandbox._pool._process
        group = f"rstar-lab-sandbox-{sandbox._pool._process.pid}"
        names = ("memory.limit_in_bytes", "memory.max")
        files = [file for name in names for file in Path("/sys/fs/cgroup").rglob(f"{group}/{name}")]
        if not files:
            pytest.skip("no control groups here")
        files[0].write_text(str(512 << 20))
        with pytest.raises(ForkError, match="short of memory"):
            await sandbox.fork("large", 4)
        assert (await sandbox.run("len(x) >> 20", session="large")).value == "300"
        assert sandbox.gauges["sessions"] == 1


async def test_sessions_are_forked_over_http(service):
    async with SandboxClient(service["url"], deadline_s=60) as client:
        await client.run("x = 1", session="http")
        copies = await client.fork("http", 3)
        results = [await client.run(f"x += {i}\nx", session=copy) for i, copy in enumerate(copies)]
        assert [result.value for result in results] == ["1", "2", "3"]
        with pytest.raises(ValueError, match="not live"):
            await client.fork("unknown", 1)
        for name in ("http", *copies):
            await client.close_session(name)


@pytest.mark.slow
async def test_an_interpreter_that_does_not_fork_holds_no_slot(sandbox):
    code = "from rstar_lab.sandbox.runtime import program\nimport time\nprogram.fork_copies = lambda *_: time.sleep(99)"
    async with session(sandbox, "deaf", code) as name, session(sandbox, "deaf too", code) as other:
        forks = [asyncio.create_task(sandbox.fork(each, 1)) for each in (name, other)]
        await asyncio.sleep(0.5)
        started = time.monotonic()
        assert (await sandbox.run("print(1)")).stdout == "1\n"
        assert time.monotonic() - started < 2
        for fork in forks:
            with pytest.raises(ForkError):
                await fork


@pytest.mark.slow
async def test_an_interpreter_cannot_truncate_the_report_of_its_copy(sandbox):
    """The supervisor of the copy maps that file, and would end with SIGBUS."""
    code = """
import os
from rstar_lab.sandbox.runtime import program
become_copy = program.become_copy
def truncate(channel, cell, fds):
    try: os.ftruncate(fds[5], 0)
    except OSError: pass
    return become_copy(channel, cell, fds)
program.become_copy = truncate"""
    async with session(sandbox, "cut", code) as name:
        copies = await sandbox.fork(name, 2)
        assert await values(sandbox, copies, "1 + 1") == ["2", "2"]


async def test_a_process_that_has_the_id_of_an_ended_copy_is_not_adopted():
    """The id of a copy that has ended can be given to a process of another call."""
    ended = subprocess.Popen(["true"])  # noqa: ASYNC220
    pidfd = os.pidfd_open(ended.pid)
    ended.wait()
    with contextlib.ExitStack() as stack, subprocess.Popen(["sleep", "60"]) as other:  # noqa: ASYNC220
        files = [stack.enter_context(tempfile.TemporaryFile()).fileno() for _ in range(5)]
        channel, report = stack.enter_context(socket.socket()), stack.enter_context(tempfile.TemporaryFile())
        report.truncate(REPORT_BYTES)
        copy = Copy(other.pid, os.getpid(), [channel.fileno(), *files[:4], report.fileno(), pidfd])
        with pytest.raises(ProcessLookupError):
            AdoptedProgram(copy, None)
        other.kill()
    os.close(pidfd)
