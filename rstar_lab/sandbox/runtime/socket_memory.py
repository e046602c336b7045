"""Measures the kernel memory of sockets, which only a control group counts."""

import os
import socket
import struct
from collections.abc import Collection

_NETLINK_SOCK_DIAG, _DIAG_BY_FAMILY, _DUMP, _DONE, _ERROR = 4, 20, 0x301, 3, 2
_SHOW_MEMORY, _MEMORY, _ALLOCATED_FOR_WRITING = 0x20, 5, 2
_HEAD, _REQUEST, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBHIIIII"), struct.Struct("=HH")
_SOCKET_BYTES, _INODE = 16, struct.Struct("=4xI")  # struct unix_diag_msg
_BUFFER_BYTES = 1 << 17


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
