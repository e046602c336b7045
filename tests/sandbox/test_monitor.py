"""Tests of the decisions about a running call, without a running program."""

import asyncio
import ctypes
import os
import signal
import subprocess
from types import SimpleNamespace

import pytest

from rstar_lab.sandbox import supervisor_pool
from rstar_lab.sandbox.runtime import kernel, procfs, protocol
from rstar_lab.sandbox.runtime.monitor import CallMonitor
from rstar_lab.sandbox.supervisor_pool import SupervisorConnection, SupervisorUnresponsive


@pytest.fixture
def program():
    """Process id of a program that sleeps. This process may use more memory than the limits of a call."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def monitor(monkeypatch, program):
    """The monitor of a call that uses no CPU time and has planned its next check."""
    request = protocol.Request(None, False, False, 10.0, 2.0, 256, 64, 64, 16, 1024, 1024)
    running = SimpleNamespace(
        pid=program, started=True, streams=SimpleNamespace(outputs=()), processes=lambda: [program]
    )
    monkeypatch.setattr(procfs, "cpu_s", lambda pids: 0.0)
    monitor = CallMonitor(request, running, None, None)  # type: ignore[arg-type]
    monitor.planned_s = monitor.next_tick_s(0.0)
    return monitor


def check_after(monitor: CallMonitor, seconds: float) -> None:
    """Check the call as if this many seconds had passed since the previous check."""
    monitor.start, monitor._last = monitor.start - seconds, monitor._last - seconds
    assert monitor.exceeded_limit() is None


@pytest.mark.parametrize(
    ("state", "waiting", "charged"),
    [("S", True, True), ("D", True, False), ("R", False, False), ("Z", True, False), ("", True, False)],
)
def test_blocked_threads_release_the_slot_and_only_sleep_is_charged(monkeypatch, monitor, state, waiting, charged):
    """A call that waits for a disk or for a lock of the kernel needs no CPU, but may not be responsible for its wait.

    Z: a zombie, before the supervisor reaps it. "": a thread that is gone.
    """
    monkeypatch.setattr(procfs, "state", lambda task: state)
    check_after(monitor, monitor.planned_s)
    assert monitor.waiting is waiting
    assert (monitor._idle_s >= monitor.planned_s) is charged


@pytest.mark.parametrize("sibling_runs", [False, True])
def test_a_wait_that_the_kernel_reports_late_counts_unless_a_sibling_ran(monkeypatch, monitor, sibling_runs):
    """The kernel adds the time that a thread waited for a CPU when it gets one: here after ten checks."""
    first, second = monitor.pid, monitor.pid + 1
    clock = {first: (0.0, 0.0), second: (0.0, 0.0)}
    monkeypatch.setattr(procfs, "state", lambda task: "R")
    monkeypatch.setattr(procfs, "schedstat", clock.__getitem__)
    monitor.start -= 100.0
    for check in range(1, 31):
        if sibling_runs:
            clock[second] = (0.05 * check, 0.0)
        if check % 10 == 0:
            clock[first] = (0.001 * check, 0.05 * check)
        monitor._measure([first, second])
    assert monitor._starved_s == pytest.approx(0.0 if sibling_runs else 1.5, abs=0.05)


def test_a_late_check_counts_at_most_two_intervals_as_sleep(monkeypatch, monitor):
    """On a machine with too few CPUs, the program may have waited for one most of the time, and be asleep only at the check."""
    monkeypatch.setattr(procfs, "state", lambda task: "S")
    check_after(monitor, 5.0)
    assert monitor._idle_s == pytest.approx(2 * monitor.planned_s)


@pytest.mark.parametrize(("started", "outcome"), [(True, "timeout"), (False, "sandbox_error")])
def test_a_program_whose_code_never_ran_did_not_time_out(monkeypatch, monitor, started, outcome):
    monkeypatch.setattr(procfs, "state", lambda task: "S")
    monitor.running.started = started
    for _ in range(12):
        check_after(monitor, monitor.next_tick_s(0.0))
    assert (monitor._idle_s > 0) is started
    monitor.start -= 12.0
    assert monitor.exceeded_limit() == outcome


REQUEST = (None, False, False, 1.0, 1.0, 64, 8, 8, 1, 1024, 1024)


def test_the_outcome_is_known_if_the_supervisor_does_not_answer(monkeypatch):
    monkeypatch.setattr(supervisor_pool, "SILENCE_S", 0.0)
    exceeded = protocol.HEAD.pack(1, protocol.EXCEEDED) + bytes([protocol.OUTCOMES.index("timeout")])

    async def silent() -> None:
        link = SupervisorConnection("bare", "bare", 1)
        link.connection_made(SimpleNamespace(write=lambda _: link.data_received(exceeded), abort=list))
        await link.call(protocol.pack_request(protocol.Request(*REQUEST), b"", b""), 0.0)

    with pytest.raises(SupervisorUnresponsive) as error:
        asyncio.run(silent())
    assert error.value.outcome == "timeout"


@pytest.mark.parametrize("outcome", ["memory", "killed"])
def test_a_late_supervisor_gets_help_and_its_result_counts(monkeypatch, outcome):
    """What the help has killed would otherwise be blamed on the program."""
    monkeypatch.setattr(supervisor_pool, "LATE_S", 0.0)

    async def late():
        link = SupervisorConnection("bare", "bare", 1)
        link.connection_made(SimpleNamespace(write=len, abort=list))
        body = protocol.RESULT_HEAD.pack(protocol.OUTCOMES.index(outcome), *[False] * 5, 0.1, 0, 0, 0)
        request = protocol.Request(*REQUEST)
        link.on_late = lambda: link.data_received(protocol.HEAD.pack(len(body), protocol.RESULT) + body)
        return (await link.call(protocol.pack_request(request, b"", b""), 0.0)).result.outcome

    if outcome == "memory":
        assert asyncio.run(late()) == "memory"
    else:
        with pytest.raises(SupervisorUnresponsive):
            asyncio.run(late())


def test_memory_that_a_process_shares_with_its_child_counts_once():
    """As between vfork and exec, which takes long on a busy machine."""
    stack = ctypes.create_string_buffer(1 << 16)
    top, sleep = (ctypes.addressof(stack) + (1 << 16)) & ~15, ctypes.cast(kernel.libc.usleep, ctypes.c_void_p)
    child = kernel.libc.clone(sleep, top, 0x100 | signal.SIGCHLD, 500_000)  # CLONE_VM
    try:
        pids = [os.getpid(), child]
        limit_mb = (procfs._sum_kb(pids, "status", ("RssAnon:", "RssShmem:")) * 3 // 4) >> 10
        assert procfs.shares_memory(child, os.getpid()) and not procfs.shares_memory(os.getpid(), os.getppid())
        assert not procfs.exceeds_memory(pids, limit_mb)
        assert procfs.exceeds_memory(pids, limit_mb // 3)
    finally:
        os.waitpid(child, 0)
