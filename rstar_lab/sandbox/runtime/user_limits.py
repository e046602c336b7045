"""Limits on what the kernel limits only per user: pipe buffers and descriptors in flight.

Programs without a user id of their own share these with each other and with all processes of the user. A program that uses them
up is ended at the next check, so that others have them again.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator

# Pipes of one call: 6,144 pages of 16,384 that a user has by default (/proc/sys/fs/pipe-user-pages-soft).
MOST_PIPES = 384
# Descriptors of one call that are in flight, of 512 that make sending fail.
MOST_IN_FLIGHT = 128
# Sockets that no process of the call has: those of its supervisor, and those that are in flight themselves. Each of the latter can
# contain descriptors that are not visible, so it counts as this many.
OTHER_SOCKETS, IN_HIDDEN_SOCKET = 8, 32
# A call with fewer descriptors in all its processes, and without data in sockets, is not examined.
FEW_DESCRIPTORS = 256


def exceeds_user_limits(
    processes: Callable[[], Collection[int]], sockets: dict[int, int], read_sockets: Callable[[], dict[int, int]]
) -> bool:
    """Return whether the processes of a call use too much of what all programs of a user share.

    Args:
        processes: Returns the process ids of the call.
        sockets: Inode -> bytes in its buffers, of all sockets of the call.
        read_sockets: Reads `sockets` again.
    """
    pids = processes()
    if sum(map(_descriptors, pids)) <= FEW_DESCRIPTORS and not any(sockets.values()):
        return False
    hidden = set(sockets)
    for _ in range(2):
        pipes, visible, in_flight = set(), set(), 0
        for path, target in _links(pids):
            if target.startswith("pipe:"):
                pipes.add(target)
            elif target.startswith("socket:[") and (inode := int(target[8:-1])) not in visible:
                visible.add(inode)
                in_flight += _in_flight(path)
        if len(pipes) > MOST_PIPES or in_flight > MOST_IN_FLIGHT:
            return True
        hidden -= visible
        if in_flight + IN_HIDDEN_SOCKET * max(0, len(hidden) - OTHER_SOCKETS) <= MOST_IN_FLIGHT:
            return False
        # The sockets of a process that started or ended meanwhile are in no process that was read. Look again.
        pids, hidden = processes(), hidden & read_sockets().keys()
    return in_flight + IN_HIDDEN_SOCKET * max(0, len(hidden) - OTHER_SOCKETS) > MOST_IN_FLIGHT


def _descriptors(pid: int) -> int:
    """Return the number of open descriptors of a process; before Linux 6.2, a number above FEW_DESCRIPTORS."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}/fd").st_size or FEW_DESCRIPTORS + 1
    return 0


def _links(pids: Collection[int]) -> Iterator[tuple[str, str]]:
    """Yield (path below /proc, target) of all descriptors."""
    for pid in pids:
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(f"/proc/{pid}/fd")
        for name in names:
            with contextlib.suppress(OSError):
                yield f"/proc/{pid}/fdinfo/{name}", os.readlink(f"/proc/{pid}/fd/{name}")


def _in_flight(path: str) -> int:
    """Return the number of descriptors in the queue of a socket. path: of its file in `fdinfo`."""
    with contextlib.suppress(OSError, ValueError), open(path) as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("scm_fds:")), 0)
    return 0
