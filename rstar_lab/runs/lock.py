"""Lock that allows one writer per run."""

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from typing_extensions import TypedDict

from rstar_lab.runs.errors import RunLocked, RunStoreError
from rstar_lab.runs.files import check_no_links, open_regular
from rstar_lab.untrusted.files import DataError, read_json

_LOCK = ".lock"


class _Holder(TypedDict):
    pid: int
    host: str


class RunLock:
    """Exclusive lock on a run's folder, held until `release` or the end of the process, including by SIGKILL.

    A forked child closes its copy of the lock, so the run is free as soon as its writer ends.
    """

    def __init__(self, run_dir: Path):
        """Acquire the lock. Raises RunLocked with the holder's pid if another process holds it for a second, and OSError if the
        folder contains a link."""
        check_no_links(run_dir)
        fd = open_regular(run_dir / _LOCK, os.O_RDWR | os.O_CREAT)
        give_up = time.monotonic() + 1.0  # `is_locked` of a reader holds a shared lock briefly
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > give_up:
                    os.close(fd)
                    raise RunLocked(
                        f"run {run_dir} is being written by {lock_holder(run_dir)}; wait for that process or stop it"
                    ) from None
                time.sleep(0.02)
        self._fd: int | None = fd
        self._run_dir = run_dir
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        os.register_at_fork(after_in_child=self.release)

    def check(self) -> None:
        """Raise RunStoreError if the folder is no longer the one that was locked: another process can be writing its successor."""
        there = None
        with suppress(OSError):
            there = (self._run_dir / _LOCK).lstat()
        if self._fd is None or there is None or not os.path.samestat(os.fstat(self._fd), there):
            raise RunStoreError(
                f"the folder {self._run_dir} was moved or deleted while this process wrote it; nothing more is written. Run the "
                "same command again, with the folder in its place"
            )

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def lock_holder(run_dir: Path) -> str:
    """Return a description of the process that acquired the lock last."""
    try:
        who = read_json(run_dir / _LOCK, _Holder)
    except DataError:
        return "another process"
    return f"process {who['pid']} on {who['host'][:80]!r}"


def is_locked(run_dir: Path) -> bool:
    """Return whether a live process is writing this run."""
    try:
        fd = open_regular(run_dir / _LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
