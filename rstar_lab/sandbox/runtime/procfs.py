"""Reads CPU time, memory, state and descendants of processes from /proc."""

import contextlib
import os
import signal

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 65536).decode("utf-8", "replace")
    finally:
        os.close(fd)


def children(pid: int) -> list[int]:
    """Return the process ids of the children of all threads of a process."""
    pids = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            pids += [int(child) for child in _read(f"/proc/{pid}/task/{task}/children").split()]
    return pids


def descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process."""
    pids = [pid]
    for parent in pids:
        pids += children(parent)
    return pids[1:]


def usage(pids: list[int]) -> tuple[float, float]:
    """Return CPU seconds (with those of reaped children) and resident memory in MiB, summed over these processes.

    Pages that are still shared with the zygote are not counted.
    """
    ticks = pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
            fields = _read(f"/proc/{pid}/statm").split()
            pages += int(fields[1]) - int(fields[2])
    return ticks / _TICKS, pages * _PAGE / 2**20


def threads(pid: int) -> int:
    """Return the number of threads of a process; 0 if it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def threads_of_user(uid: int) -> int:
    """Return the number of threads of all processes of a user."""
    count = 0
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.stat(f"/proc/{entry}").st_uid == uid:
                count += len(os.listdir(f"/proc/{entry}/task"))
    return count


def ready(task: int) -> bool:
    """Return whether a thread runs, waits for a CPU, or waits in the kernel for a lock (state R or D).

    Forks of one zygote share kernel locks, which a fork bomb in the background may hold. A thread in state D that has
    children is not counted: it waits for its own child (vfork).
    """
    try:
        state = _read(f"/proc/{task}/stat").rpartition(")")[2][1]
    except (OSError, IndexError):
        return False
    return state == "R" or (state == "D" and not children(task))


def schedstat(task: int) -> tuple[float, float] | None:
    """Return the seconds a thread has run and the seconds it was ready but waited for a CPU; None if it is gone."""
    try:
        ran_ns, delayed_ns = _read(f"/proc/{task}/schedstat").split()[:2]
    except (OSError, ValueError):
        return None
    return int(ran_ns) / 1e9, int(delayed_ns) / 1e9


def end_all(pid: int) -> None:
    """Kill all descendants of this process (a subreaper) until none is left. Used if the sandbox has no PID namespace."""
    while True:
        for child in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            while True:
                done, _ = os.waitpid(-1, os.WNOHANG)
                if not done:
                    break
        except ChildProcessError:
            return
