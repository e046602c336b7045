"""Soak tests with a mixed load: correct results, no leaks, also while processes are killed. Part of `make test-all`."""

import asyncio
import os
import random
import shutil

import psutil
import pytest

from benchmarks.soak import KINDS, sandbox_parts, sandbox_processes_of, soak
from rstar_lab.sandbox import Limits, LocalSandbox


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("make_room", [True, False])
async def test_10000_mixed_calls_have_their_outcomes(make_room: bool):
    draw = random.Random(0)
    names = draw.choices(list(KINDS), [kind.weight for kind in KINDS.values()], k=10_000)
    limits = Limits(timeout_s=1, wall_slack_s=30, memory_mb=1024, queue_timeout_s=1800, make_room=make_room)
    me = psutil.Process()
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
        assert sandbox.retries == 0
        await asyncio.sleep(1)
        assert len(me.children(recursive=True)) <= processes + 16
        assert me.num_fds() <= fds + 16
    assert not [child for child in me.children(recursive=True) if "box.zygote" in " ".join(child.cmdline())]


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
async def test_only_the_processes_of_these_sandboxes_are_counted():
    others = sandbox_processes_of({os.getpid()})
    async with LocalSandbox(workers=1):
        assert sandbox_processes_of({os.getpid()}) >= others + 2
        assert sandbox_processes_of({os.getppid()}) == 0
    assert sandbox_processes_of({os.getpid()}) == others


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_call_is_lost_while_processes_are_killed():
    if shutil.which("redis-server") is None:
        pytest.skip("REDIS IS NOT TESTED: redis-server is not installed (`make services` installs it where it may)")
    result = soak(10_000, 50, workers=2, seed=0, report=lambda _: None)
    assert result.passed, result.to_dict()
