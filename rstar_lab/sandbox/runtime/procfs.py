"""Reads CPU time, memory, state and descendants of processes from /proc."""

import contextlib
import os
import platform
import signal

from rstar_lab.sandbox.runtime import kernel

# The proportional size of shared memory is read for at most this many processes.
EXACT_PROCESSES = 8
_TICKS = os.sysconf("SC_CLK_TCK")
_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
_KCMP_VM = 1
# Missing in gVisor.
_CHILDREN_FILES = os.path.exists("/proc/thread-self/children")


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 65536).decode("utf-8", "replace")
    finally:
        os.close(fd)


def _stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on, the state; an empty list if the process is gone."""
    with contextlib.suppress(OSError):
        return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return []


def children(pid: int) -> list[int]:
    """Return the process ids of the children of all threads of a process."""
    pids: list[int] = []
    if not _CHILDREN_FILES:
        with contextlib.suppress(OSError):
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(name) == pid]
        return pids
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            pids += [int(child) for child in _read(f"/proc/{pid}/task/{task}/children").split()]
    return pids


def _parent(pid: int | str) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else -1


def descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process."""
    pids = [pid]
    for parent in pids:
        pids += children(parent)
    return pids[1:]


def cpu_s(pids: list[int]) -> float:
    """Return CPU seconds (with those of reaped children), summed over these processes."""
    return sum(int(field) for pid in pids for field in _stat(pid)[11:15]) / _TICKS


def exceeds_memory(pids: list[int], memory_mb: int) -> bool:
    """Return whether these processes use more than `memory_mb` MiB of anonymous and shared memory together.

    Files in memory count only if they are mapped. For up to EXACT_PROCESSES processes, a page that k processes share (the
    zygote included) counts as 1/k in each of them. For more processes it counts fully in each, because reading the proportional
    size takes long.
    """
    pids = [*map(living_thread, pids)]
    if _sum_kb(pids, "status", ("RssAnon:", "RssShmem:")) <= memory_mb << 10:
        return False
    pids = [pid for pid in pids if not shares_memory(pid, _parent(pid))]
    if len(pids) > EXACT_PROCESSES:
        return _sum_kb(pids, "status", ("RssAnon:", "RssShmem:")) > memory_mb << 10
    return _sum_kb(pids, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) > memory_mb << 10


def shares_memory(pid: int, other: int) -> bool:
    """Return whether two processes have one address space, as a process and its child do between vfork and exec."""
    return other > 0 and _KCMP is not None and kernel.libc.syscall(_KCMP, pid, other, _KCMP_VM, 0, 0) == 0


def _sum_kb(pids: list[int], file: str, names: tuple[str, ...]) -> int:
    """Return the sum of these values, in KiB, over a file of all processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            for line in _read(f"/proc/{pid}/{file}").splitlines():
                if line.startswith(names):
                    total += int(line.split()[1])
    return total


def has_memory(pid: int) -> bool:
    """Return whether a process still has its memory, which the kernel frees first when the process exits."""
    with contextlib.suppress(OSError):
        return "VmSize:" in _read(f"/proc/{pid}/status")
    return False


def living_thread(pid: int) -> int:
    """Return the id of a running thread of a process; `pid` if there is none.

    After the first thread of a process exits, /proc/PID shows neither its memory nor its descriptors; those of its threads do.
    """
    if state(pid) == "Z":
        with contextlib.suppress(OSError):
            return next(
                (int(task) for task in os.listdir(f"/proc/{pid}/task") if state(int(task)) not in ("Z", "")), pid
            )
    return pid


def threads(pid: int) -> int:
    """Return the number of threads of a process; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task"))
    return 0


def threads_of_user(uid: int) -> int:
    """Return the number of threads of all processes of a user."""
    count = 0
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.stat(f"/proc/{entry}").st_uid == uid:
                count += len(os.listdir(f"/proc/{entry}/task"))
    return count


def state(task: int) -> str:
    """Return the state of a thread as one letter; "" if it is gone.

    R: it runs or waits for a CPU. D: it waits in the kernel for a lock or a disk. A thread in state D that has children counts
    as S (asleep), because it waits for its own child (vfork).
    """
    letter = _stat(task)[:1]
    return "S" if letter == ["D"] and children(task) else "".join(letter)


def schedstat(task: int) -> tuple[float, float] | None:
    """Return (seconds a thread has run, seconds it was ready and waited for a CPU); None if it is gone."""
    with contextlib.suppress(OSError, ValueError):
        ran_ns, delayed_ns = _read(f"/proc/{task}/schedstat").split()[:2]
        return int(ran_ns) / 1e9, int(delayed_ns) / 1e9
    return None


def kill(pid: int) -> None:
    """Kill a process. Has no effect if it is gone, or belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def reap() -> bool:
    """Reap the children of this process that have ended. Returns whether others still run."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def end_all() -> None:
    """Kill all descendants of this process (a subreaper) until none is left. Used if the sandbox has no PID namespace."""
    while reap():
        for pid in descendants(os.getpid()):
            kill(pid)
