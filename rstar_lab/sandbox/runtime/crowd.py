"""Limits on the CPU time of calls with many threads.

Some kernels (measured: Linux 6.18, version 1 of control groups) give a group of many threads that wake up often all CPU time,
whatever the weights of the groups are. Supervisors, zygotes and the embedding program would then stand still for many seconds.
A limit on CPU time holds where weights do not, so no call, and no number of calls with many threads, may use all CPUs.
"""

import contextlib
import math
import mmap
import os

from rstar_lab.sandbox.runtime.cgroup import PERIOD_US, Group, read_file

# A call with more processes and threads is a crowd.
CROWD_TASKS = 16
# CPUs that a call may use until its supervisor has counted its threads: a little more than one thread needs.
FIRST_CPUS = 1.1
# CPU time that one call may use, and that all crowds together may use, as shares of the CPUs that the sandbox has.
CALL_SHARE, CROWDS_SHARE = 0.9, 0.8
_SLOTS = 4096


class Crowds:
    """Counts the crowds of a sandbox in memory that all its supervisors share. Created before they are forked.

    cpus: CPUs that the sandbox has.
    """

    def __init__(self, cpus: float) -> None:
        self.cpus = cpus
        self._map = mmap.mmap(-1, _SLOTS)

    @property
    def first_cpus(self) -> float:
        """CPUs that a call may use at first."""
        return min(FIRST_CPUS, self.call_cpus)

    @property
    def call_cpus(self) -> float:
        """CPUs that one call may use that is not a crowd."""
        return CALL_SHARE * self.cpus

    def mark(self, supervisor: int, active: bool) -> None:
        """Record whether the supervisor with this process id runs a crowd that uses CPU time."""
        self._map[supervisor % _SLOTS] = active

    def hide_from_children(self) -> None:
        """Unmap the memory in processes that this process, a supervisor, forks: they become programs."""
        self._map.madvise(mmap.MADV_DONTFORK)

    def cpus_each(self) -> float:
        """Return the CPUs that each crowd may use."""
        return CROWDS_SHARE * self.cpus / max(1, self._map[:].count(1))


def available_cpus(group: Group) -> float:
    """Return the CPUs that this process may use, or the smallest limit of the groups above `group` if that is less."""
    cpus = float(len(os.sched_getaffinity(0)))
    folder = os.readlink(f"/proc/self/fd/{group.folders['cpu']}")
    while len(folder := os.path.dirname(folder)) > 1:
        with contextlib.suppress(OSError, ValueError):
            cpus = min(cpus, _limit(folder))
    return cpus


def _limit(folder: str) -> float:
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(FileNotFoundError):
            quota, period = read_file(at, "cpu.max").split()
            return math.inf if quota == "max" else int(quota) / int(period)
        quota_us = int(read_file(at, "cpu.cfs_quota_us"))
        return math.inf if quota_us < 0 else quota_us / int(read_file(at, "cpu.cfs_period_us") or PERIOD_US)
    finally:
        os.close(at)
