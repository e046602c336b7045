"""Tests of calls with many threads, which some kernels would give all CPU time."""

import asyncio
import os
import time

import pytest

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import CallResult, Limits, LocalSandbox
from rstar_lab.sandbox.runtime import cgroup, pressure
from rstar_lab.sandbox.runtime.pressure import Crowds

TIMEOUT_S, SLACK_S = 3.0, 2.0
# The threads of a process wait for the interpreter's lock and wake up every few milliseconds. The program ends itself, so that
# a defect of the sandbox does not block the machine.
SPIN = """
import os, threading, time
end = time.monotonic() + 20
def spin():
    while time.monotonic() < end:
        pass
for _ in range({processes}):
    if os.fork() == 0:
        threads = [threading.Thread(target=spin) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        os._exit(0)
while time.monotonic() < end:
    time.sleep(0.1)
"""


async def run_beside_honest_calls(processes: int, calls: int) -> tuple[list[CallResult], float, list[CallResult]]:
    """Return the results of the crowds, the longest time (s) in which this event loop stood still, and the honest results."""
    longest_s, honest = 0.0, []

    async def watch() -> None:
        nonlocal longest_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.02)
            longest_s = max(longest_s, time.monotonic() - before - 0.02)

    async with LocalSandbox(Limits(timeout_s=TIMEOUT_S, wall_slack_s=SLACK_S)) as sandbox:
        await sandbox.run("print(1)")
        if "cgroup" in sandbox.missing_layers:
            pytest.skip("requires control groups")
        watching = asyncio.create_task(watch())
        crowds = asyncio.gather(*(sandbox.run(SPIN.format(processes=processes)) for _ in range(calls)))
        while not crowds.done():
            honest.append(await sandbox.run("print(1)"))
            await asyncio.sleep(0.05)
        watching.cancel()
        return await crowds, longest_s, honest


@pytest.mark.slow
def test_a_call_with_many_threads_ends_in_time_while_the_event_loop_runs():
    results, longest_s, honest = asyncio.run(run_beside_honest_calls(40, 1))
    assert [result.outcome for result in results] == [Outcome.TIMEOUT]
    assert results[0].duration_s < TIMEOUT_S + SLACK_S + 0.5
    assert longest_s < 1.0
    assert {result.outcome for result in honest} == {Outcome.OK}


@pytest.mark.soak
@pytest.mark.parametrize(("processes", "calls"), [(40, 3), (100, 1), (100, 3), (4, 4)])
def test_crowds_share_the_cpus_with_everything_else(processes, calls):
    for _ in range(5):
        results, longest_s, honest = asyncio.run(run_beside_honest_calls(processes, calls))
        # Several crowds at once can take each other's CPU time.
        assert {result.outcome for result in results} <= {Outcome.TIMEOUT, Outcome.SANDBOX_ERROR}
        assert max(result.duration_s for result in results) < TIMEOUT_S + SLACK_S + 1.0
        assert longest_s < 1.0
        assert {result.outcome for result in honest} == {Outcome.OK}


def test_all_crowds_together_leave_cpu_time_to_others():
    crowds = Crowds(cpus=8.0)
    assert crowds.call_cpus < 8.0
    assert crowds.first_cpus <= crowds.call_cpus
    for active in range(1, 20):
        crowds.mark(100 + active, True)
        assert crowds.cpus_each() * active == pytest.approx(pressure.CROWDS_SHARE * 8.0)
    for active in range(1, 20):
        crowds.mark(100 + active, False)
    assert crowds.cpus_each() == pytest.approx(pressure.CROWDS_SHARE * 8.0)


def test_a_single_cpu_is_not_given_to_one_call():
    assert Crowds(cpus=1.0).first_cpus < 1.0


@pytest.fixture
def group():
    group = cgroup.create(f"{cgroup.PREFIX}-test-crowds")
    if group is None:
        pytest.skip("requires control groups")
    yield group
    cgroup.destroy(group)


def test_cpu_limits_of_the_groups_above_count(group):
    child = group.child("inner")
    assert 0 < pressure.available_cpus(child) <= os.cpu_count()
    if group.above:  # the CPU groups of children are beside this one
        return
    group.limit_cpus(0.5)
    assert pressure.available_cpus(child) == pytest.approx(0.5)


def test_the_kernel_enforces_the_cpu_limit(group):
    limit = "cpu.cfs_quota_us" if group.version == 1 else "cpu.max"
    group.limit_cpus(0.25)
    assert group.read("cpu", limit).split()[0] == "25000"
    assert pressure.Pressure(group).crowds.cpus > 0
