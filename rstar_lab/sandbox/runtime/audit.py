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
_NUMBER = struct.Struct("=i")


class DeniedCalls:
    """Counts the refused system calls of one program, by name. Use one instance per program.

    The supervisor takes the descriptor of the notifications from the program before that runs user code. The program then closes
    its own copy, with which it could allow its own calls. The descriptor is not sent over a socket: the kernel limits descriptors
    in flight per user, and another program of the same user may have used up the limit.

    pidfd: of the program, set when it has been forked.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._listener = -1
        self._poller = select.epoll()
        self._poller.register(self._ours, select.EPOLLIN)
        self._errors = seccomp.refusal_errors(platform.machine())
        self.counts: Counter[str] = Counter()
        self.pidfd = -1

    def fileno(self) -> int:
        """Return a descriptor that is readable when `handle` has something to do."""
        return self._poller.fileno()

    def handle(self) -> None:
        """Take the descriptor of the notifications, or answer one notification."""
        for fd, event in self._poller.poll(0):
            if fd != self._listener:
                self._poller.unregister(self._ours)
                number = self._ours.recv(_NUMBER.size)
                # On an error the program gets no answer and ends.
                with contextlib.suppress(OSError, struct.error):
                    self._listener = kernel.pidfd_getfd(self.pidfd, *_NUMBER.unpack(number))
                    self._poller.register(self._listener, select.EPOLLIN)
                    self._ours.send(b".")
                self._ours.close()
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


def install_and_hand_over(audit_filter: seccomp.Filter, channel: int) -> None:
    """Install the filter in this process and close the descriptor of its notifications as soon as the supervisor has it.

    channel: socket over which the supervisor learns the number of the descriptor; closed too. Raises OSError.
    """
    number = REFUSED_NUMBERS["seccomp"][seccomp.COLUMN[platform.machine()]]
    listener = kernel.libc.syscall(number, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.c_void_p(audit_filter.address))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp: no listener for notifications")
    with socket.socket(fileno=channel) as sock:
        sock.send(_NUMBER.pack(listener))
        taken = sock.recv(1)
    os.close(listener)
    if not taken:
        raise OSError("seccomp: the supervisor did not take the descriptor of the notifications")


def _names() -> dict[int, str]:
    column = seccomp.COLUMN.get(platform.machine(), 0)
    known = {**NUMBERS, **REFUSED_NUMBERS}
    return {number: name for name, numbers in known.items() if (number := numbers[column]) is not None}


_NAMES = _names()
