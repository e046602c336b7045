"""What /proc tells of a running program: processor time, memory, descendants."""

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
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += [int(child) for child in _read(f"/proc/{pid}/task/{task}/children").split()]
    return found


def descendants(pid: int) -> list[int]:
    """All processes beneath this one, itself left out."""
    found = [pid]
    for parent in found:
        found += children(parent)
    return found[1:]


def usage(pids: list[int]) -> tuple[float, float]:
    """Of these processes: processor seconds, with those of children they have waited for, and resident memory in MiB.

    Pages of the zygote that they still share are left out.
    """
    ticks = pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
            fields = _read(f"/proc/{pid}/statm").split()
            pages += int(fields[1]) - int(fields[2])
    return ticks / _TICKS, pages * _PAGE / 2**20


def threads_of_user(uid: int) -> int:
    count = 0
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.stat(f"/proc/{entry}").st_uid == uid:
                count += len(os.listdir(f"/proc/{entry}/task"))
    return count


def ready(task: int) -> bool:
    """Is this thread on a processor, or held up by others: waiting for a processor, or in the kernel for a lock?

    All that was forked from one zygote shares locks, which a fork bomb in the background may hold. A parent is waiting for
    its own child there (vfork).
    """
    try:
        state = _read(f"/proc/{task}/stat").rpartition(")")[2][1]
    except (OSError, IndexError):
        return False
    return state == "R" or (state == "D" and not children(task))


def end_all(pid: int) -> None:
    """Kill all children of this process, a subreaper, until none is left: what a PID namespace does in one blow."""
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
