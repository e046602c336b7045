"""Temporary folders with a lock. The next sandbox of the same user removes those of a process that was killed."""

import contextlib
import fcntl
import glob
import os
import shutil


def make_locked_folder(parent: str, prefix: str) -> tuple[str, int]:
    """Create a folder `parent/prefix-...`, locked while this process or a fork of it holds the returned descriptor.

    Other users can enter the folder but not list it.
    """
    while True:
        folder = f"{parent}/{prefix}-{os.getpid()}-{os.urandom(4).hex()}"
        os.mkdir(folder, 0o711)
        with contextlib.suppress(FileNotFoundError):  # another process has removed the folder before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.chmod(folder, 0o711)
            return folder, lock


def remove_stale_folders(parent: str, prefix: str) -> None:
    """Remove the folders of `make_locked_folder` whose processes have ended."""
    for folder in glob.glob(f"{glob.escape(parent)}/{prefix}-*"):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
