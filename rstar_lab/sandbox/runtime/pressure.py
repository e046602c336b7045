"""Limits of a whole sandbox. While it is short of memory or processes, no session starts and the largest calls are ended."""

import contextlib
import math
import mmap
import os

from rstar_lab.sandbox.runtime import kernel
from rstar_lab.sandbox.runtime.cgroup import MEMORY_LIMIT, Group

# Limits of a sandbox: this share of the memory and of the processes that are available when it starts, but at least these.
SANDBOX_SHARE, LEAST_PROCESSES, LEAST_MEMORY_MB = 0.8, 1024, 1024
# No new session starts while the sandbox uses more than this share of its memory or of its processes.
SESSIONS_SHARE = 0.5
# While the sandbox uses more than PRESSURE_SHARE, calls that use more than LARGEST_SHARE of its limit are ended. The second
# threshold falls to 0 as the usage reaches the limit.
PRESSURE_SHARE = 0.8
LARGEST_SHARE = 0.1
# Calls that sleep or are blocked use memory. One may wait for each of these MiB of the machine's memory, up to a maximum.
MEMORY_PER_WAITING_MB = 32
MAX_WAITING = 1024

# Limits on the CPU time of calls with many threads (crowds).
# Some kernels (measured: Linux 6.18, version 1 of control groups) give a group of many threads that wake up often all CPU time,
# whatever the weights of the groups are. Supervisors, zygotes and the embedding program would then stand still for many seconds.
# A limit on CPU time holds where weights do not, so no call, and no number of calls with many threads, may use all CPUs.
# A call with more processes and threads is a crowd.
CROWD_TASKS = 16
# CPUs that a call may use until its supervisor has counted its threads: a little more than one thread needs.
FIRST_CPUS = 1.1
# CPU time that one call may use, and that all crowds together may use, as shares of the CPUs that the sandbox has.
CALL_SHARE, CROWDS_SHARE = 0.9, 0.8
_SLOTS = 4096

_MEMORY_USAGE = {1: "memory.usage_in_bytes", 2: "memory.current"}
_PROCESS_MEMORY = {1: ("total_rss", "total_shmem"), 2: ("anon", "shmem")}


def max_waiting_calls() -> int:
    """Return how many calls of one sandbox may sleep or be blocked at once without holding a slot."""
    memory_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    return max(1, min(MAX_WAITING, memory_mb // MEMORY_PER_WAITING_MB))


def limit_sandbox(sandbox: Group) -> None:
    """Limit memory and processes of a whole sandbox to a share of what this machine has available."""
    pids, memory = (os.readlink(f"/proc/self/fd/{sandbox.folders[name]}") for name in ("pids", "memory"))
    with contextlib.suppress(OSError):
        max_processes = max(LEAST_PROCESSES, int(SANDBOX_SHARE * _available_processes(pids)))
        kernel.write_file("pids.max", b"%d" % max_processes, sandbox.folders["pids"])
    with contextlib.suppress(OSError):
        sandbox.limit_memory(max(LEAST_MEMORY_MB, int(SANDBOX_SHARE * _available_memory_mb(memory))))


class Pressure:
    """Compares the usage of all calls with the limits of the sandbox's control group. Created before supervisors are forked."""

    def __init__(self, sandbox: Group) -> None:
        self.sandbox = sandbox
        self.crowds = Crowds(available_cpus(sandbox))

    def most_mb(self) -> float:
        """Return the largest memory limit (MiB) of a call, so that it reaches its own limit before that of the sandbox."""
        return PRESSURE_SHARE * self._memory_limit_mb()

    def outcome_of_kill(self, group: Group) -> str:
        """Return the outcome of a call after the OOM killer has killed one of its processes. group: the call's control group."""
        much_mb = LARGEST_SHARE * self._memory_limit_mb()
        return "memory" if group.limit_was_reached(much_mb) else "sandbox_error"

    def refuses_sessions(self) -> bool:
        """Return whether a new session could take memory or processes from calls."""
        return self._memory_share() > SESSIONS_SHARE or self._process_share() > SESSIONS_SHARE

    def exceeded_limit(self, group: Group, tasks: int) -> str | None:
        """Return the outcome with which a call must end because the sandbox is short of memory or processes; else None.

        group: the call's control group. tasks: its processes and threads.
        """
        if tasks > _threshold(self._process_share()) * self._process_limit():
            return "killed"
        # This counter is cheap to read but includes reclaimable caches, so it only decides whether to measure exactly.
        charged_mb = int(self.sandbox.read("memory", _MEMORY_USAGE[group.version])) / 2**20
        if charged_mb < PRESSURE_SHARE * self._memory_limit_mb():
            return None
        return "memory" if _used_mb(group) > _threshold(self._memory_share()) * self._memory_limit_mb() else None

    def _memory_limit_mb(self) -> float:
        return _limit(self.sandbox.read("memory", MEMORY_LIMIT[self.sandbox.version])) / 2**20

    def _memory_share(self) -> float:
        return _used_mb(self.sandbox) / self._memory_limit_mb()

    def _process_limit(self) -> float:
        return _limit(self.sandbox.read("pids", "pids.max"))

    def _process_share(self) -> float:
        return int(self.sandbox.read("pids", "pids.current")) / self._process_limit()


def _threshold(share: float) -> float:
    """Return the share of the limit that one call may use while all calls together use `share` of it."""
    if share < PRESSURE_SHARE:
        return 1.0
    return LARGEST_SHARE * max(0.0, 1.0 - share) / (1.0 - PRESSURE_SHARE)


def _used_mb(group: Group) -> float:
    """Return MiB of processes and of files in memory of a group and the groups below it, without caches."""
    lines = [line.split() for line in group.read("memory", "memory.stat").splitlines()]
    return sum(int(size) for name, size in lines if name in _PROCESS_MEMORY[group.version]) / 2**20


def _limit(text: str) -> float:
    return math.inf if text.strip() == "max" else float(text)


def _texts_above(folder: str, name: str) -> list[str]:
    """Return the contents of the files of this name in all groups above `folder`."""
    texts = []
    while len(folder := os.path.dirname(folder)) > 1:
        with contextlib.suppress(OSError), open(f"{folder}/{name}") as file:
            texts.append(file.read())
    return texts


def _read_numbers(folder: str, name: str) -> list[float]:
    return [_limit(text) for text in _texts_above(folder, name)]


def _available_processes(folder: str) -> float:
    """Return how many more processes and threads the kernel and all groups above `folder` allow."""
    limits = []
    for name in ("pid_max", "threads-max"):
        with open(f"/proc/sys/kernel/{name}") as file:
            limits.append(float(file.read()))
    with open("/proc/loadavg") as file:
        running = int(file.read().split()[3].partition("/")[2])
    groups = zip(_read_numbers(folder, "pids.max"), _read_numbers(folder, "pids.current"), strict=False)
    return min([min(limits) - running, *(limit - used for limit, used in groups)])


def _available_memory_mb(folder: str) -> float:
    """Return the available memory of the machine (MiB), or the smallest limit of the groups above `folder` if that is less."""
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    return min([available, *_read_numbers(folder, MEMORY_LIMIT[1]), *_read_numbers(folder, MEMORY_LIMIT[2])]) / 2**20


class Crowds:
    """Counts the crowds of a sandbox in memory that all its supervisors share. Created before they are forked.

    cpus: CPUs that the sandbox has.
    """

    def __init__(self, cpus: float) -> None:
        self.cpus = cpus
        # CPUs that a call may use at first, and later if it is not a crowd.
        self.first_cpus, self.call_cpus = min(FIRST_CPUS, CALL_SHARE * cpus), CALL_SHARE * cpus
        self._map = mmap.mmap(-1, _SLOTS)

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
    folder = os.readlink(f"/proc/self/fd/{group.folders['cpu']}")
    texts = [_texts_above(folder, name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    quotas = [*(text.split() for text in _texts_above(folder, "cpu.max")), *zip(*texts, strict=False)]
    limits = [float(quota) / float(period) for quota, period in quotas if quota.strip() not in ("max", "-1")]
    return min([float(len(os.sched_getaffinity(0))), *limits])
