"""Soak tests with a mixed load: correct results, no leaks, also while processes are killed. Part of `make test-all`."""

import asyncio
import os
import random
import shutil
import subprocess
import sys

import psutil
import pytest

from benchmarks.soak import KINDS, count_running, descendants, sandbox_parts, soak
from rstar_lab.sandbox import Limits, LocalSandbox


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_10000_mixed_calls_have_their_outcomes():
    draw = random.Random(0)
    names = draw.choices(list(KINDS), [kind.weight for kind in KINDS.values()], k=10_000)
    limits = Limits(timeout_s=1, wall_slack_s=30, memory_mb=1024, queue_timeout_s=1800)
    me = psutil.Process()
    others = descendants(me.pid)
    async with LocalSandbox(limits) as sandbox:
        gate = asyncio.Semaphore(256)
        wrong: list[tuple[str, object]] = []

        async def one(name: str) -> None:
            kind = KINDS[name]
            async with gate:
                result = await sandbox.run(kind.code, memory_mb=kind.memory_mb)
            if result.outcome not in kind.outcomes or kind.stdout not in (None, result.stdout):
                wrong.append((name, result))

        await asyncio.gather(*(one(name) for name in names[:500]))
        processes, fds = len(me.children(recursive=True)), me.num_fds()
        await asyncio.gather(*(one(name) for name in names[500:]))
        assert wrong == []
        assert sum(sandbox.outcomes.values()) == 10_000
        assert sandbox.events["retry"] == 0
        await asyncio.sleep(1)
        assert len(me.children(recursive=True)) <= processes + 16
        assert me.num_fds() <= fds + 16
        started = descendants(me.pid) - others
        assert started
    psutil.wait_procs(started, timeout=15)
    assert count_running(started) == 0


@pytest.mark.slow
async def test_sandbox_parts_returns_zygotes_and_supervisors():
    others = sandbox_parts(os.getpid())  # of sandboxes that other tests of this process share
    async with LocalSandbox(workers=2) as sandbox:
        await asyncio.gather(*(sandbox.run("import math") for _ in range(4)))
        running = asyncio.create_task(sandbox.run("import time\ntime.sleep(99)"))
        await asyncio.sleep(0.5)
        parts = {part: set(pids) - set(others[part]) for part, pids in sandbox_parts(os.getpid()).items()}
        assert 1 <= len(parts["zygote"]) <= 4 and 1 <= len(parts["supervisor"]) <= 4
        running.cancel()


@pytest.mark.slow
async def test_processes_of_a_sandbox_are_counted_until_they_end():
    others = descendants(os.getpid())
    async with LocalSandbox(workers=1):
        started = descendants(os.getpid()) - others
        assert count_running(started) == len(started) >= 2
    psutil.wait_procs(started, timeout=10)
    assert count_running(started) == 0


def test_a_process_that_outlives_its_owner_is_counted():
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        (child,) = descendants(owner.pid)
        owner.kill()
    assert count_running([child]) == 1
    child.kill()
    psutil.wait_procs([child], timeout=10)
    assert count_running([child]) == 0 and descendants(owner.pid) == set()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_call_is_lost_while_processes_are_killed():
    if shutil.which("redis-server") is None:
        pytest.skip("REDIS IS NOT TESTED: redis-server is not installed (`make services` installs it where it may)")
    result = soak(10_000, 50, workers=2, seed=0, report=lambda _: None)
    assert result.passed, result.to_dict()
