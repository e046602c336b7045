"""Measures what only a control group or a user id of its own limits: memory of sockets, and limits that all calls of a user share."""

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator

from rstar_lab.sandbox.runtime import procfs

_NETLINK_SOCK_DIAG, _DIAG_BY_FAMILY, _DUMP, _DONE, _ERROR = 4, 20, 0x301, 3, 2
_SHOW_MEMORY, _MEMORY, _ALLOCATED_FOR_WRITING = 0x20, 5, 2
_HEAD, _REQUEST, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBHIIIII"), struct.Struct("=HH")
_SOCKET_BYTES, _INODE = 16, struct.Struct("=4xI")  # struct unix_diag_msg
_BUFFER_BYTES = 1 << 17
# Pipes of one call: 6,144 pages of 16,384 that a user has by default (/proc/sys/fs/pipe-user-pages-soft).
MOST_PIPES = 384
# Descriptors of one call that are in flight, of 512 that make sending fail.
MOST_IN_FLIGHT = 128
# epoll instances of all processes of one call. Each watches up to 512 descriptors, with 200 bytes of kernel memory for each, and a
# user has a limit of them (/proc/sys/fs/epoll/max_user_watches).
MOST_EPOLLS = 256
# Sockets that no process of the call has: those of its supervisor, and those that are in flight themselves. Each of the latter can
# contain descriptors that are not visible, so it counts as this many.
OTHER_SOCKETS, IN_HIDDEN_SOCKET = 8, 32
# A call with fewer descriptors in all its processes, and without data in sockets, is not examined.
FEW_DESCRIPTORS = 256


class SocketMemory:
    """Lists all Unix sockets of the caller's network namespace with the bytes in their buffers.

    A supervisor has a network namespace of its own, so these are the sockets of its program. Sockets that are being sent to
    another process, and that no process has open, count too.
    """

    def __init__(self) -> None:
        self._sock: socket.socket | None = None
        self._ignored: Collection[int] = ()

    def ignore_present(self) -> None:
        """Ignore the present sockets from now on. Call this before a program starts: sockets that an earlier program has sent through
        each other stay in the kernel until its garbage collection."""
        self._ignored = self._read().keys()

    def bytes_by_socket(self) -> dict[int, int]:
        """Return inode -> bytes in its buffers; empty if the kernel does not report them."""
        return {inode: size for inode, size in self._read().items() if inode not in self._ignored}

    def _read(self) -> dict[int, int]:
        try:
            if self._sock is None:
                self._sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
                self._sock.settimeout(1.0)
            body = _REQUEST.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_MEMORY, 0, 0)
            self._sock.send(_HEAD.pack(_HEAD.size + len(body), _DIAG_BY_FAMILY, _DUMP, 0, os.getpid()) + body)
            found: dict[int, int] = {}
            while _add(self._sock.recv(_BUFFER_BYTES), found):
                pass
            return found
        except OSError:
            return {}

    def exceeds_user_limits(self, processes: Callable[[], Collection[int]], sockets: dict[int, int]) -> bool:
        """Return whether a call has too many pipes, descriptors in flight or epoll instances, whose limits all programs share.

        processes: returns the process ids of the call. sockets: the latest `bytes_by_socket`.
        """
        pids = [*map(procfs.living_thread, processes())]
        if sum(map(_descriptors, pids)) <= FEW_DESCRIPTORS and not any(sockets.values()):
            return False
        hidden = set(sockets)
        for _ in range(3):
            pipes, visible, in_flight, epolls = set(), set(), 0, 0
            for path, target in _links(pids):
                epolls += target == "anon_inode:[eventpoll]"
                if target.startswith("pipe:"):
                    pipes.add(target)
                elif target.startswith("socket:[") and (inode := int(target[8:-1])) not in visible:
                    visible.add(inode)
                    in_flight += _in_flight(path)
            if len(pipes) > MOST_PIPES or in_flight > MOST_IN_FLIGHT or epolls > MOST_EPOLLS:
                return True
            hidden -= visible
            if in_flight + IN_HIDDEN_SOCKET * max(0, len(hidden) - OTHER_SOCKETS) <= MOST_IN_FLIGHT:
                return False
            # The sockets of a process that started or ended meanwhile are in no process that was read. Look again.
            pids, hidden = [*map(procfs.living_thread, processes())], hidden & self.bytes_by_socket().keys()
        return True


def _add(data: bytes, found: dict[int, int]) -> bool:
    """Add the sockets in a part of the answer to `found`. Returns False if it is the last part."""
    at = 0
    while at + _HEAD.size <= len(data):
        size, kind, *_ = _HEAD.unpack_from(data, at)
        if kind in (_DONE, _ERROR) or size < _HEAD.size:
            return False
        inode = _INODE.unpack_from(data, at + _HEAD.size)[0]
        inner, end = at + _HEAD.size + _SOCKET_BYTES, at + size
        while inner + _ATTRIBUTE.size <= end:
            length, name = _ATTRIBUTE.unpack_from(data, inner)
            if name == _MEMORY:
                found[inode] = struct.unpack_from("=I", data, inner + _ATTRIBUTE.size + 4 * _ALLOCATED_FOR_WRITING)[0]
            inner += max(_ATTRIBUTE.size, (length + 3) & ~3)
        at += (size + 3) & ~3
    return True


def _descriptors(pid: int) -> int:
    """Return the number of open descriptors of a process; before Linux 6.2, a number above FEW_DESCRIPTORS."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}/fd").st_size or FEW_DESCRIPTORS + 1
    return 0


def _links(pids: Collection[int]) -> Iterator[tuple[str, str]]:
    """Yield (path below /proc, target) of all descriptors."""
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            try:
                names = os.listdir(f"/proc/{pid}/fd")
            except PermissionError:
                # It ends, or executes a file that it may not read: then each descriptor may be that of a pipe.
                names = []
                if procfs.has_memory(pid):
                    yield from (("", f"pipe:{pid}-{number}") for number in range(_descriptors(pid)))
            for name in names:
                with contextlib.suppress(OSError):
                    yield f"/proc/{pid}/fdinfo/{name}", os.readlink(f"/proc/{pid}/fd/{name}")


def _in_flight(path: str) -> int:
    """Return the number of descriptors in the queue of a socket. path: of its file in `fdinfo`."""
    with contextlib.suppress(OSError, ValueError), open(path) as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("scm_fds:")), 0)
    return 0
