"""Landlock rules: which files a program may read and write, as a second layer in addition to the mount namespace."""

import fcntl
import os
import struct
from collections.abc import Iterator

from rstar_lab.sandbox.runtime import kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
READ = EXECUTE | READ_FILE | READ_DIR
DEVICE = READ_FILE | WRITE_FILE
# Access rights on files and folders by ABI version. The scopes of ABI 6 are abstract sockets and signals.
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15
ABI_WITH_SCOPES = 6
# The rules use file descriptors from this number on. A program closes all lower ones, so that it knows the numbers of its files.
FIRST_FD = 16
_TCP = 0b11
_SCOPES = 0b11


def abi() -> int:
    """Return the kernel's Landlock ABI version; 0 if it does not support Landlock."""
    return max(0, kernel.libc.syscall(kernel.SYS_LANDLOCK_CREATE_RULESET, None, 0, 1))


class Rules:
    """A Landlock rule set: the listed files and folders with their access rights; everything else is denied."""

    def __init__(self, version: int, read: list[str], write: list[str], devices: list[str]) -> None:
        everything = _RIGHTS[min(version, 5)]
        self._attributes = struct.pack(
            "=QQQ", everything, _TCP if version >= 4 else 0, _SCOPES if version >= ABI_WITH_SCOPES else 0
        )
        self._size = 24 if version >= ABI_WITH_SCOPES else 16 if version >= 4 else 8
        self._everything = everything
        # The paths are opened once: a rule applies to the file itself, in every mount namespace.
        self._fixed = [rule for path in read for rule in self._rule(path, READ)]
        self._fixed += [rule for path in devices for rule in self._rule(path, DEVICE)]
        self._write = write

    def _rule(self, path: str, rights: int) -> list[bytes]:
        if not os.path.exists(path):
            return []
        low = os.open(path, os.O_PATH | os.O_CLOEXEC)
        fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
        os.close(low)
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS & self._everything
        return [struct.pack("=Qi", rights, fd)]

    def steps(self, scratch: str, fd: int) -> Iterator[kernel.Step]:
        """Yield steps that apply the rules to a process and its children. They require no_new_privs.

        scratch: additional writable folder. fd: the lowest free descriptor; the next one must be free too.
        """
        syscall = kernel.locked_libc.syscall
        yield "landlock", syscall, (kernel.SYS_LANDLOCK_CREATE_RULESET, self._attributes, self._size, 0)
        for rule in self._fixed:
            yield "landlock", syscall, (kernel.SYS_LANDLOCK_ADD_RULE, fd, 1, rule, 0)
        rule = struct.pack("=Qi", self._everything, fd + 1)
        for path in [*self._write, scratch] if scratch else self._write:
            yield "landlock", os.open, (path, os.O_PATH)
            yield "landlock", syscall, (kernel.SYS_LANDLOCK_ADD_RULE, fd, 1, rule, 0)
            yield "landlock", os.close, (fd + 1,)
        yield "landlock", syscall, (kernel.SYS_LANDLOCK_RESTRICT_SELF, fd, 0)
        yield "landlock", os.close, (fd,)
