"""Tests that processes of a sandbox end when they should, and that calls survive killed processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers.sandbox_processes import ROOT, sandbox_processes

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Call, Limits, LocalSandbox, supervisor_pool

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def test_closing_ends_every_process():
    before = set(sandbox_processes(os.getpid()))
    sandbox = LocalSandbox(workers=2)
    await sandbox.start()
    await sandbox.run("x = 1", session="kept")
    running = asyncio.create_task(sandbox.run("import time\ntime.sleep(60)", timeout_s=60))
    await asyncio.sleep(0.5)
    started = set(sandbox_processes(os.getpid())) - before
    assert len(started) > 3
    await sandbox.aclose()
    await sandbox.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await running
    with pytest.raises(RuntimeError, match="closed"):
        await sandbox.run("1")
    assert not psutil.wait_procs(started, timeout=10)[1]


EMBEDDER = """
import asyncio
from rstar_lab.sandbox import LocalSandbox
async def main():
    async with LocalSandbox(workers=2) as sandbox:
        await sandbox.run("x = 1", session="kept")
        code = "import os, time\\nos.fork()\\nos.setsid()\\ntime.sleep(60)"
        calls = [asyncio.create_task(sandbox.run(code, timeout_s=60)) for _ in range(2)]
        await asyncio.sleep(1)
        print("ready", flush=True)
        await asyncio.gather(*calls)
asyncio.run(main())
"""


async def test_all_processes_end_when_the_embedding_process_is_killed():
    embedder = subprocess.Popen([sys.executable, "-c", EMBEDDER], stdout=subprocess.PIPE, cwd=ROOT)  # noqa: ASYNC220
    assert embedder.stdout is not None
    assert await asyncio.to_thread(embedder.stdout.readline) == b"ready\n"
    processes = sandbox_processes(embedder.pid)
    assert len(processes) > 6
    embedder.send_signal(signal.SIGKILL)
    embedder.wait()
    embedder.stdout.close()
    left = (await asyncio.to_thread(psutil.wait_procs, processes, 15))[1]
    assert left == []


async def kill_later(processes: list[psutil.Process], seconds: float) -> None:
    await asyncio.sleep(seconds)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


async def test_calls_are_retried_when_zygotes_and_supervisors_are_killed():
    before = set(sandbox_processes(os.getpid()))
    async with LocalSandbox(Limits(timeout_s=20), workers=2) as sandbox:
        await asyncio.gather(*(sandbox.run("import numpy") for _ in range(2)))
        mine = [process for process in sandbox_processes(os.getpid()) if process not in before]
        assert len(mine) > 4
        # CPU time and not sleep, because sleeping calls run all at once.
        calls = [Call(f"import time\nwhile time.process_time() < 0.2: pass\nprint({i})") for i in range(40)]
        # In this order: supervisors, zygotes of the tiers, the first zygote, the launcher.
        killer = asyncio.create_task(_kill_one_by_one(sandbox, mine))
        results = await sandbox.run_many(calls)
        await killer
        assert [result.stdout for result in results] == [f"{i}\n" for i in range(40)]
        assert sandbox.events["retry"] > 0
        assert sandbox.outcomes == {Outcome.OK: 42}


async def _kill_one_by_one(sandbox: LocalSandbox, processes: list[psutil.Process]) -> None:
    """Wait for a result between two kills, so that no call runs out of retries."""
    for process in reversed(processes):
        answered = sandbox.outcomes.total()
        await kill_later([process], 0.2)
        for _ in range(200):
            if sandbox.outcomes.total() > answered:
                break
            await asyncio.sleep(0.05)


async def test_a_killed_supervisor_leaves_no_program_running():
    async with LocalSandbox(workers=1) as sandbox:
        await sandbox.run("1")
        before = set(sandbox_processes(os.getpid()))
        call = asyncio.create_task(sandbox.run("import os, time\nos.fork()\nos.setsid()\ntime.sleep(3)", timeout_s=20))
        await asyncio.sleep(0.7)
        # Both processes of the program are session leaders; zygotes that still warm up are not.
        programs = {p for p in set(sandbox_processes(os.getpid())) - before if os.getsid(p.pid) == p.pid}
        assert len(programs) == 2
        parents = {program.parent() for program in programs} & before
        assert len(parents) == 1
        await kill_later(list(parents), 0)
        assert (await call).outcome == Outcome.OK
        assert not psutil.wait_procs(programs, timeout=10)[1]


async def test_a_zygote_that_does_not_answer_is_replaced(monkeypatch, caplog):
    monkeypatch.setattr(supervisor_pool, "PONG_S", 1.0)
    async with LocalSandbox(Limits(timeout_s=1, wall_slack_s=0.5), workers=1) as sandbox:
        await sandbox.run("1", session="s")
        for process in psutil.Process(sandbox._pool._process.pid).children(recursive=True):
            process.suspend()
        await sandbox.run("2")
        async with asyncio.timeout(60):
            while (await sandbox.run("3")).value != "3":
                pass
    assert sandbox.events["zygotes_restarted"] == 1
    assert any("did not answer for 1 s" in message for message in caplog.messages)


async def test_control_groups_are_removed():
    groups = Path("/proc/self/cgroup").read_text()
    if "memory" not in groups:
        pytest.skip("no version 1 control groups here")
    base = Path("/sys/fs/cgroup/pids")
    before = set(base.glob("rstar-lab-sandbox-*"))  # other sandboxes of this process
    async with LocalSandbox(workers=1) as sandbox:
        await sandbox.run("1")
        for i in range(5):
            await sandbox.run("x = 1", session=str(i))
            await sandbox.close_session(str(i))
        await asyncio.sleep(0.5)
        await sandbox.run("x = 1", session="last")
        new = set(base.glob("rstar-lab-sandbox-*")) - before
        (mine,) = [path for path in new if psutil.Process().pid in _owners(path)]
        slots = [path.name for path in mine.iterdir() if path.is_dir()]
        assert len(slots) <= 4
    assert not mine.exists()


def _owners(path: Path) -> set[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return {parent.pid for parent in psutil.Process(int(path.name.split("-")[-1])).parents()}
    return set()
