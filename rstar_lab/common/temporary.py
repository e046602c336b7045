"""Temporary folders with a lock. The next command of the same user removes those of a process that was killed."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Self

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"rstar-[a-z]+-\d+-[0-9a-f]{8}")
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LockedFolder:
    """A folder `path`, locked while this process or a fork of it lives, and removed by `cleanup` or at the exit.

    kind: lower-case letters, in the name of the folder. parent: default: that of `tempfile`.
    """

    def __init__(self, kind: str, parent: Path | None = None):
        parent = parent or Path(tempfile.gettempdir())
        remove_stale_folders(parent)
        self.path, lock = _make_locked_folder(parent / f"rstar-{kind}-{os.getpid()}")
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def cleanup(self) -> None:
        self._finalizer()

    def keep(self) -> None:
        """Leave the folder to the next command, which removes it."""
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cleanup()


def _remove(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make_locked_folder(prefix: Path) -> tuple[Path, int]:
    """Create a folder `prefix-RANDOM`, locked while this process or a fork of it holds the returned descriptor."""
    while True:
        folder = Path(f"{prefix}-{os.urandom(4).hex()}")
        folder.mkdir(0o700)
        with contextlib.suppress(FileNotFoundError):  # another process has removed the folder before it was locked
            lock = os.open(folder, _OPEN)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # it is being removed
                continue
            except OSError:  # a file system without locks: no other process removes the folder
                pass
            return folder, lock


def remove_stale_folders(*parents: Path) -> None:
    """Remove the folders of `LockedFolder` in these folders that belong to this user and whose processes have ended."""
    for folder in (folder for parent in parents for folder in parent.glob("rstar-*")):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            lock = os.open(folder, _OPEN)
            stack.callback(os.close, lock)
            if os.fstat(lock).st_uid == os.geteuid() and _NAME.fullmatch(folder.name):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
