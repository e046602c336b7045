"""Audit mode: the kernel asks the supervisor about each system call that the filter refuses; the supervisor counts it and refuses."""

import contextlib
import ctypes
import fcntl
import os
import platform
import select
import socket
import struct
from collections import Counter

from rstar_lab.sandbox.runtime import kernel, seccomp
from rstar_lab.sandbox.runtime.syscalls import NUMBERS, REFUSED_NUMBERS

# struct seccomp_notif: id, pid, flags, number, architecture, instruction pointer, 6 arguments; struct seccomp_notif_resp.
_NOTIFICATION, _RESPONSE = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8


class DeniedCalls:
    """Counts the refused system calls of one program, by name. Use one instance per program.

    The program sends the descriptor of its notifications to the supervisor before it runs user code. It then closes its own
    copy, with which it could allow its own calls.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._listener = -1
        self._poller = select.epoll()
        self._poller.register(self._ours, select.EPOLLIN)
        self._errors = seccomp.refusal_errors(platform.machine())
        self.counts: Counter[str] = Counter()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `handle` has something to do."""
        return self._poller.fileno()

    def handle(self) -> None:
        """Receive the descriptor of the notifications, or answer one notification."""
        for fd, event in self._poller.poll(0):
            if fd != self._listener:
                self._poller.unregister(self._ours)
                _, fds, _, _ = socket.recv_fds(self._ours, 1, 1)
                if fds:
                    self._listener = fds[0]
                    self._poller.register(self._listener, select.EPOLLIN)
            elif event & select.EPOLLIN:
                self._refuse_call()
            else:  # all processes have ended
                self._poller.unregister(self._listener)

    def _refuse_call(self) -> None:
        notification = bytearray(_NOTIFICATION.size)
        with contextlib.suppress(OSError):  # the calling thread has ended
            fcntl.ioctl(self._listener, _RECEIVE, notification)
            call, _, _, number, *_ = _NOTIFICATION.unpack(notification)
            self.counts[_NAMES.get(number, "unknown")] += 1
            fcntl.ioctl(self._listener, _SEND, _RESPONSE.pack(call, 0, -self._errors.get(number, 1), 0))

    def close(self) -> None:
        self._ours.close()
        self.theirs.close()
        self._poller.close()
        if self._listener >= 0:
            os.close(self._listener)


def install_and_send(audit_filter: seccomp.Filter, channel: int) -> None:
    """Install the filter in this process, send the descriptor of its notifications over the socket `channel`, and close both."""
    number = REFUSED_NUMBERS["seccomp"][seccomp.COLUMN[platform.machine()]]
    listener = kernel.libc.syscall(number, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.c_void_p(audit_filter.address))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp: no listener for notifications")
    with socket.socket(fileno=channel) as sock:
        socket.send_fds(sock, [b"."], [listener])
    os.close(listener)


def _names() -> dict[int, str]:
    column = seccomp.COLUMN.get(platform.machine(), 0)
    known = {**NUMBERS, **REFUSED_NUMBERS}
    return {number: name for name, numbers in known.items() if (number := numbers[column]) is not None}


_NAMES = _names()
