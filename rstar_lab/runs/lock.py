"""One writer a run."""

import fcntl
import json
import os
import socket
import time
from pathlib import Path

from rstar_lab.runs.errors import RunLocked

_LOCK = ".lock"


class RunLock:
    """An exclusive lock on a run's folder, held until `release` or the end of the process, SIGKILL included.

    A child made by fork drops its copy, so that a run is free once its writer is dead, whatever else lives.
    """

    def __init__(self, run_dir: Path, patience_s: float = 1.0):
        """Raises RunLocked, which names the holder's pid, where another writer keeps the lock for `patience_s`."""
        path = run_dir / _LOCK
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        give_up = time.monotonic() + patience_s  # a reader that asks `is_locked` holds a shared lock for an instant
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > give_up:
                    os.close(fd)
                    raise RunLocked(
                        f"run {run_dir} is being written by {lock_holder(run_dir)}; wait for it or stop it"
                    ) from None
                time.sleep(0.02)
        self._fd: int | None = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        os.register_at_fork(after_in_child=self._forget)

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    _forget = release


def lock_holder(run_dir: Path) -> str:
    """Who wrote their name into the lock file last."""
    try:
        who = json.loads((run_dir / _LOCK).read_text())
        return f"process {who['pid']} on {who['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"


def is_locked(run_dir: Path) -> bool:
    """Does a live process write this run?"""
    try:
        fd = os.open(run_dir / _LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
