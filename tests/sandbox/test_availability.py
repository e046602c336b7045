"""Tests of programs that try to block other calls, or to have their failure attributed to the sandbox."""

import asyncio
import contextlib
import os
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Limits, LocalSandbox

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SLEEPER = "import time\ntime.sleep(99)"
MODEL = {Outcome.OK, Outcome.EXCEPTION, Outcome.TIMEOUT, Outcome.MEMORY, Outcome.KILLED, Outcome.OUTPUT_LIMIT}
CLONE = """
import ctypes, os, signal, time
libc = ctypes.CDLL(None, use_errno=True)
pid = libc.syscall(56, {flags} | signal.SIGCHLD, 0, 0, 0, 0)
if pid == 0:
    time.sleep(99)
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox():
    async with LocalSandbox(Limits(timeout_s=2.0, wall_slack_s=4.0, memory_mb=256), workers=2) as sandbox:
        await asyncio.gather(*(sandbox.run(f"import {name}") for name in ("math", "numpy", "sympy")))
        yield sandbox


async def test_sleeping_calls_end_as_timeout_at_their_limit(sandbox):
    results = await asyncio.gather(*(sandbox.run(SLEEPER, timeout_s=1.0) for _ in range(8)))
    assert {result.outcome for result in results} == {Outcome.TIMEOUT}
    assert max(result.duration_s for result in results) < 2.0


async def test_a_call_that_wakes_up_is_still_limited_in_cpu_time(sandbox):
    result = await sandbox.run("import time\ntime.sleep(0.5)\nwhile True: pass", timeout_s=1.0)
    assert result.outcome == Outcome.TIMEOUT


async def test_clone_parent_is_refused_and_leaves_no_process(sandbox):
    """A child created with CLONE_PARENT would be an unexpected child of the supervisor."""
    before = set(psutil.Process(os.getpid()).children(recursive=True))
    results = await asyncio.gather(*(sandbox.run(CLONE.format(flags="0x8000") + "print(pid)") for _ in range(4)))
    assert {(result.outcome, result.stdout) for result in results} == {(Outcome.OK, "-1\n")}
    assert (await sandbox.run("print('next')")).stdout == "next\n"
    started = set(psutil.Process(os.getpid()).children(recursive=True)) - before
    assert len(started) <= 2 + 1


ATTRIBUTION = {
    "a thread created with CLONE_VFORK": (
        "import ctypes, time\nlibc = ctypes.CDLL(None)\n"
        "stack = ctypes.create_string_buffer(1 << 16)\n"
        "top = ctypes.addressof(stack) + (1 << 16) - 64\n"
        "libc.clone(libc.pause, ctypes.c_void_p(top), 0x4000 | 0x10000 | 0x800 | 0x100 | 0x200 | 0x400, None)\n"
        "time.sleep(99)"
    ),
    "CLONE_VFORK with CLONE_PARENT": CLONE.format(flags="0xC000") + "time.sleep(99)",
    "vfork": "import ctypes, time\nctypes.CDLL(None).vfork()\ntime.sleep(99)",
    "affinity to one CPU beside loops": (
        "import os, threading\n"
        "try: os.sched_setaffinity(0, {0})\nexcept OSError: pass\n"
        "for _ in range(8): threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()\n"
        "while True: pass"
    ),
    "threads that compete with each other": (
        "import os, time\nfor _ in range(40):\n if os.fork() == 0: break\n"
        "while True:\n time.sleep(0.05)\n end = time.perf_counter() + 0.001\n while time.perf_counter() < end: pass"
    ),
    "direct reads": (
        "import mmap, os\nbuffer = mmap.mmap(-1, 1 << 20)\n"
        "import sys\nfd = os.open(sys.executable, os.O_RDONLY | os.O_DIRECT)\n"
        "while True: os.preadv(fd, [buffer], 0)"
    ),
    "a small memory limit": "x = []\nwhile True: x.append(bytearray(1 << 16))",
}  # fmt: skip


@pytest.mark.parametrize("name", ATTRIBUTION)
async def test_a_program_cannot_cause_a_sandbox_error(sandbox, name):
    for _ in range(3):  # on a busy machine a call may not get enough CPU time
        memory_mb = 16 if "memory" in name else None
        result = await sandbox.run(ATTRIBUTION[name], timeout_s=1.0, memory_mb=memory_mb)
        if result.outcome in MODEL:
            break
    assert result.outcome in MODEL, result
    assert (await sandbox.run("print('next')")).stdout == "next\n"


async def test_a_session_that_appends_to_stdin_does_not_break_its_supervisor(sandbox):
    code = "import fcntl, os\nfor fd in (0, 1):\n fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)"
    await sandbox.run(code, session="append")
    result = await sandbox.run("print(input())", "line\n", session="append")
    assert (result.outcome, result.stdout) == (Outcome.OK, "line\n")


FORGE = {
    "answers in advance": "import os\nfor _ in range(50): os.write(3, b'.')",
    "a thread answers": (
        "import os, threading, time\n"
        "def answer():\n"
        " while True:\n"
        "  os.read(3, 1)\n"
        "  os.write(1, b'all tests passed'); os.write(3, b'.')\n"
        "threading.Thread(target=answer, daemon=True).start()"
    ),
    "a child answers": (
        "import os\n"
        "if os.fork() == 0:\n"
        " while True:\n"
        "  os.read(3, 1)\n"
        "  os.write(1, b'all tests passed'); os.write(3, b'.')"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGE)
async def test_a_cell_cannot_forge_the_results_of_later_cells(sandbox, name):
    await sandbox.run(FORGE[name], session=name, timeout_s=1.0)
    results = [await sandbox.run("print(6 * 7)", session=name, timeout_s=1.0) for _ in range(4)]
    for result in results:
        if result.outcome == Outcome.OK:
            assert result.stdout == "42\n"
        else:
            assert result.outcome in MODEL


async def test_a_session_cannot_seal_its_streams(sandbox):
    """The supervisor empties them before each cell."""
    code = "import fcntl\nfor seal in (2, 4, 8):\n try: fcntl.fcntl(1, fcntl.F_ADD_SEALS, seal)\n except OSError: pass\nprint('x')"
    assert (await sandbox.run(code, session="seals")).stdout == "x\n"
    assert (await sandbox.run("print(2)", session="seals")).stdout == "2\n"


async def test_a_session_that_is_ended_between_cells_is_not_lost(sandbox):
    """The next cell starts a new interpreter and states the reason; it is not a `sandbox_error`."""
    code = (
        "import threading, time\ndef many():\n time.sleep(0.3)\n for _ in range(100):\n"
        "  threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\nthreading.Thread(target=many).start()"
    )
    for _ in range(2):
        assert (await sandbox.run(code, session="later")).outcome == Outcome.OK
        await asyncio.sleep(2.0)
        result = await sandbox.run("1", session="later")
        assert result.value == "1" and "between its cells" in result.stderr, result


PAGE_TABLES = (
    "import mmap\nk = []\nwhile True:\n k.append(mmap.mmap(-1, 1 << 30, flags=0x4022))\n"
    " for i in range(0, 1 << 30, 2 << 20): k[-1][i]"
)
MEMORY_FILES = "for i in range(10**5): open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))"
FORK_BOMB = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"


async def test_memory_without_a_process_to_kill_does_not_end_the_supervisor(sandbox):
    """Page tables and files in memory are not part of the size by which the kernel chooses a process to kill."""
    if "cgroup" in sandbox.missing_layers:
        pytest.skip("no control groups here")
    died = sandbox.events["supervisor_died"]
    for code in [PAGE_TABLES, MEMORY_FILES, FORK_BOMB] * 8:
        # On a busy machine it may not get the CPU time to reach its limit.
        assert (await sandbox.run(code, memory_mb=16)).outcome in {Outcome.MEMORY, Outcome.TIMEOUT}
    assert sandbox.events["supervisor_died"] == died


async def test_a_call_with_a_limit_above_that_of_the_sandbox_ends_as_memory():
    """The sandbox's own limit would be reached first, and the call would count as a failure of the infrastructure."""
    async with LocalSandbox(Limits(timeout_s=10.0, memory_mb=8192), workers=2) as sandbox:
        await sandbox.run("import math")
        limit_file(sandbox, "memory.limit_in_bytes", "memory.max").write_text(str(64 << 20))
        code = "x = []\nwhile True: x.append(bytearray(1 << 22))"
        assert (await sandbox.run(code)).outcome == Outcome.MEMORY
        results = await asyncio.gather(*(sandbox.run(code) for _ in range(4)))
        assert {result.outcome for result in results} == {Outcome.MEMORY}
        assert not +sandbox.events


async def test_a_session_that_never_reads_does_not_block_its_supervisor(sandbox):
    """300 cells fill the channel of an interpreter that does not read."""
    stop = "import os, time\nos.dup2(os.open('/dev/null', 0), 3)\n"
    result = await sandbox.run(stop, session="unread", timeout_s=1.0)
    assert result.outcome in MODEL
    assert (await sandbox.run("print(1)", session="unread", timeout_s=1.0)).outcome in MODEL


HOLD_THREADS = (
    "import threading, time\nfor _ in range({}): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
)


async def test_a_session_cannot_keep_hundreds_of_idle_threads(sandbox):
    """Three such sessions would reach the process limit of a small machine."""
    result = await sandbox.run(HOLD_THREADS.format(200), session="threads")
    assert result.outcome == Outcome.OK and "interpreter has ended" in result.stderr
    assert (await sandbox.run(HOLD_THREADS.format(20) + "\nx = 1", session="few")).stderr == ""
    assert (await sandbox.run("x", session="few")).value == "1"


def limit_file(sandbox: LocalSandbox, *names: str) -> Path:
    """Return the file of the sandbox's control group with one of these names."""
    assert sandbox._pool and sandbox._pool._process
    while True:
        with contextlib.suppress(FileNotFoundError):  # another sandbox has removed a group meanwhile
            for name in names:
                for path in Path("/sys/fs/cgroup").rglob(f"rstar-lab-sandbox-{sandbox._pool._process.pid}/{name}"):
                    return path
            pytest.skip("no control groups here")


async def test_calls_with_most_processes_end_before_others_run_out_of_them():
    async with LocalSandbox(Limits(timeout_s=20.0), workers=2) as sandbox:
        await asyncio.gather(*(sandbox.run("import math") for _ in range(16)))
        limit_file(sandbox, "pids.max").write_text("2000")
        greedy = [asyncio.create_task(sandbox.run(HOLD_THREADS.format(480) + "\ntime.sleep(99)")) for _ in range(8)]
        await asyncio.sleep(3.0)
        honest = [await sandbox.run("print(1)") for _ in range(100)]
        assert {(result.outcome, result.stdout) for result in honest} == {(Outcome.OK, "1\n")}
        ended = [task.result().outcome for task in greedy if task.done()]
        assert Outcome.KILLED in ended and set(ended) <= {Outcome.KILLED, Outcome.EXCEPTION}, ended
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)


async def test_calls_with_most_memory_end_before_others_run_out_of_it():
    async with LocalSandbox(Limits(timeout_s=20.0, memory_mb=400), workers=2) as sandbox:
        await asyncio.gather(*(sandbox.run("import math") for _ in range(16)))
        limit = limit_file(sandbox, "memory.limit_in_bytes", "memory.max")
        assert int(limit.read_text()) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit.write_text(str(1 << 30))
        hold = "x = bytearray(150 << 20)\nimport time\ntime.sleep(99)"
        greedy = [asyncio.create_task(sandbox.run(hold)) for _ in range(12)]
        await asyncio.sleep(5.0)
        honest = [await sandbox.run("print(1)") for _ in range(100)]
        assert {(result.outcome, result.stdout) for result in honest} == {(Outcome.OK, "1\n")}
        ended = [task.result().outcome for task in greedy if task.done()]
        assert ended and set(ended) == {Outcome.MEMORY}, ended
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)


async def test_sessions_are_refused_before_calls_run_out_of_memory():
    async with LocalSandbox(Limits(timeout_s=5.0), workers=2) as sandbox:
        await asyncio.gather(*(sandbox.run("import sympy") for _ in range(2)))
        limit_file(sandbox, "memory.limit_in_bytes", "memory.max").write_text(str(1 << 30))
        results = [await sandbox.run("x = bytearray(200 << 20)", session=str(i)) for i in range(6)]
        outcomes = [result.outcome for result in results]
        refused = outcomes.count(Outcome.SANDBOX_ERROR)
        assert 2 <= refused <= 4 and outcomes == [Outcome.OK] * (6 - refused) + [Outcome.SANDBOX_ERROR] * refused
        assert "short of memory" in results[-1].stderr
        assert [(await sandbox.run("len(x) >> 20", session=str(i))).value for i in range(2)] == ["200", "200"]
        assert (await sandbox.run("print(1)")).stdout == "1\n"
