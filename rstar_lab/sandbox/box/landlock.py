"""Landlock: what may be read and written, even where a mount namespace fails us."""

import ctypes
import os
import struct

from rstar_lab.sandbox.box import kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
READ = EXECUTE | READ_FILE | READ_DIR
DEVICE = READ_FILE | WRITE_FILE
# Rights on files and folders of each ABI; the scopes of ABI 6 are abstract sockets and signals.
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15
_TCP = 0b11
_SCOPES = 0b11


def abi() -> int:
    """0 where the kernel has no Landlock."""
    return max(0, kernel.libc.syscall(kernel.SYS_LANDLOCK_CREATE_RULESET, None, 0, 1))


class Rules:
    """Folders and files with the rights on them; everything else is refused."""

    def __init__(self, version: int, read: list[str], write: list[str], devices: list[str]) -> None:
        if version < 1:
            raise OSError("the kernel has no Landlock")
        everything = _RIGHTS[min(version, 5)]
        self._attributes = struct.pack("=QQQ", everything, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
        self._size = 24 if version >= 6 else 16 if version >= 4 else 8
        self._paths = [(path, READ) for path in read] + [(path, everything) for path in write]
        self._paths += [(path, DEVICE) for path in devices]
        self._everything = everything

    def enforce(self, scratch: str = "") -> None:
        """On this process and all it starts, from now on; no_new_privs must be set. scratch: one more writable folder."""
        ruleset = kernel.libc.syscall(kernel.SYS_LANDLOCK_CREATE_RULESET, self._attributes, self._size, 0)
        if ruleset < 0:
            raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
        for path, rights in [*self._paths, (scratch, self._everything)] if scratch else self._paths:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            if not os.path.isdir(path):
                rights &= _FILE_RIGHTS & self._everything
            rule = struct.pack("=Qi", rights, fd)
            failed = kernel.libc.syscall(kernel.SYS_LANDLOCK_ADD_RULE, ruleset, 1, rule, 0) < 0
            number = ctypes.get_errno()
            os.close(fd)
            if failed:
                raise OSError(number, f"landlock_add_rule {path}")
        if kernel.libc.syscall(kernel.SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0) < 0:
            raise OSError(ctypes.get_errno(), "landlock_restrict_self")
        os.close(ruleset)
