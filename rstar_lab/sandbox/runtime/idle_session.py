"""Monitors a session between its cells."""

import select

from rstar_lab.sandbox.runtime import procfs
from rstar_lab.sandbox.runtime.cgroup import PREEMPTED, Group
from rstar_lab.sandbox.runtime.forked_program import Program
from rstar_lab.sandbox.runtime.pressure import Pressure
from rstar_lab.sandbox.runtime.protocol import Channel

# Seconds between two checks of an idle session.
IDLE_TICK_S = 10.0
# A session that uses more than this many CPU seconds in the first second after a cell gets a low CPU weight.
FIRST_TICK_S, FIRST_CPU_S = 1.0, 0.1
# Between its cells a session may use this many CPU seconds per interval, and keep this many processes and threads.
IDLE_CPU_S = 1.0
IDLE_TASKS = 64


def usage(running: Program, group: Group | None) -> tuple[float, int]:
    """Return the CPU seconds so far and the number of processes and threads of a session."""
    if group:
        return group.cpu_s(), len(group.tasks()) - group.own_processes
    tree = running.processes()
    return procfs.cpu_s(tree), sum(procfs.threads(pid) for pid in tree)


def wait_for_message(channel: Channel, running: Program, group: Group | None, pressure: Pressure | None) -> bool:
    """Wait for the session's next message.

    Returns False if the session must end: it uses CPU time, keeps many processes, or uses much memory or many processes while
    the sandbox is short of them.
    """
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    cpu_s, tasks = usage(running, group)
    if tasks > IDLE_TASKS:
        return False
    tick_s = FIRST_TICK_S
    while not poller.poll(tick_s * 1000):
        before_s = cpu_s
        cpu_s, tasks = usage(running, group)
        if group and tick_s == FIRST_TICK_S and cpu_s - before_s > FIRST_CPU_S:
            group.set_weight(PREEMPTED)
        tick_s = IDLE_TICK_S
        if cpu_s - before_s > IDLE_CPU_S or tasks > IDLE_TASKS:
            return False
        if group and pressure and pressure.exceeded_limit(group, tasks):
            return False
    return True
