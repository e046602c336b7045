"""The caller's side of the worker processes: sends comparisons to them and waits for the result.

Only CPU time decides that a comparison is too expensive. A comparison that found no worker, whose worker was killed, or that
had less CPU time than its limit because the machine is busy is undecided; it is repeated before `compare` gives up.
"""

import atexit
import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from rstar_lab.common.errors import UserError, install_hint
from rstar_lab.verify import worker

WORKERS = min(16, os.cpu_count() or 1)
# Wall-clock limit of a comparison, all repetitions included: only a machine that gives a worker less than 1% of a core for
# two minutes reaches it.
GIVE_UP_S = 120.0

NAMED_S = 30.0  # seconds after which a comparison without a reply is logged
LOG = logging.getLogger(__name__)

# Environment variables of the server: only those that Python needs to start, so that it has none of the caller's secrets.
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")


class Undecided(UserError):
    """A comparison has no result: it ran out of its time slice, or the machine gave it no worker or no CPU time."""

    def __init__(self, message: str = "the answer could not be compared: the machine gave the comparison no CPU time"):
        super().__init__(message)


class WorkerPool:
    """Sends comparisons to worker processes. Thread-safe. A forked copy of the caller starts its own processes."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()  # connections to workers
        self._idle: list[socket.socket] = []  # those without a comparison
        self._process: subprocess.Popen[bytes] | None = None

    def after_fork(self) -> None:
        """Forget the processes of the parent, which the child cannot wait for."""
        for connection in self._open:
            connection.close()
        if self._process:
            self._process.returncode = 0
        self._reset()

    def warm_up(self, timeout_s: float = 60.0) -> None:
        """Start the workers. Raises UserError if they are not ready after `timeout_s` seconds."""
        try:
            self.compare(r"\lim_{x\to0}\frac{\sin x}{x}", "1", timeout_s)
        except Undecided:
            raise UserError(f"sympy did not start within {timeout_s:g} s") from None

    def compare(self, candidate: str, answer: str, timeout_s: float = GIVE_UP_S, slice_s: float | None = None) -> bool:
        """Return whether two answers are equal.

        Args:
            candidate: The answer to check, without box.
            answer: The true answer.
            timeout_s: Wall-clock seconds after which an undecided comparison is given up.
            slice_s: CPU seconds after which the comparison is undecided instead of different, so that a caller can
                compare other pairs first. Default: none; a comparison that uses worker.CPU_S is different.

        Returns:
            False also for a comparison that has used its CPU time or its memory, or that crashes sympy.

        Raises:
            Undecided: After `timeout_s` or `slice_s`.
            UserError: If sympy is not installed.
        """
        request = json.dumps([candidate, answer, worker.CPU_S if slice_s is None else slice_s]).encode() + b"\n"
        deadline, crashes = time.monotonic() + timeout_s, 0
        while crashes < 2 and (connection := self._take(deadline)) is not None:
            reply = _reply(connection, request, deadline)
            self._give_back(connection, usable=bool(reply))
            if reply == worker.OUT_OF_TIME and slice_s is not None:
                break
            if reply in (worker.EQUAL, worker.DIFFERENT, worker.OUT_OF_TIME):
                return reply == worker.EQUAL
            crashes += reply == worker.CRASHED
        if crashes == 2:
            return False
        raise Undecided

    def _take(self, deadline: float) -> socket.socket | None:
        """Return a connection to an idle worker, or None if no worker becomes idle before the deadline."""
        with self._changed:
            while (left := deadline - time.monotonic()) > 0:
                if self._idle:
                    return self._idle.pop()
                if not self._open:
                    self._start()
                else:
                    self._changed.wait(left)
        return None

    def _give_back(self, connection: socket.socket, usable: bool) -> None:
        """Return a connection to the pool, or close it: its worker was killed or is still busy."""
        with self._changed:
            if usable and connection in self._open:
                self._idle.append(connection)
            else:
                self._open.discard(connection)
                connection.close()
            self._changed.notify_all()

    def _start(self) -> None:
        """Start the server; call with the lock held. Raises UserError if the last one ended because sympy is missing."""
        self._stop()
        pairs = [socket.socketpair() for _ in range(WORKERS)]
        # Run by path and with -P: this finds the same package as the caller, and no file beside it shadows a module.
        # Standard streams are not inherited: an open pipe would block a process that reads the caller's output.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(worker.__file__)), *(str(theirs.fileno()) for _, theirs in pairs)],
            pass_fds=[theirs.fileno() for _, theirs in pairs],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | {"PYTHONHASHSEED": "0"},
        )
        for ours, theirs in pairs:
            theirs.close()
            self._open.add(ours)
            self._idle.append(ours)

    def _stop(self) -> None:
        """Stop the server and its workers. Raises UserError if it had ended because sympy is missing."""
        for connection in self._open:
            connection.close()
        process, self._process, self._open, self._idle = self._process, None, set(), []
        if process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)  # it ends by itself when its sockets close
            process.kill()
            if process.wait() == worker.NOT_INSTALLED:
                raise UserError(f"comparing answers other than numbers requires sympy: {install_hint('sandbox')}")

    def close(self) -> None:
        """Stop the server and its workers."""
        if self._changed.acquire(timeout=1.0):
            with contextlib.suppress(Exception):
                self._stop()
            self._changed.release()


def _reply(connection: socket.socket, request: bytes, deadline: float) -> bytes:
    """Return the reply of a worker, or b"" if its connection closed or the deadline passed."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    try:
        connection.sendall(request)
        left_s = max(0.0, deadline - time.monotonic())
        if left_s > NAMED_S and not poll.poll(NAMED_S * 1000):
            left_s -= NAMED_S
            LOG.warning("a process that compares answers: no reply for %.0f s; in %.0f s it is ended", NAMED_S, left_s)
        return connection.recv(1) if poll.poll(left_s * 1000) else b""
    except (OSError, ValueError):  # another thread has closed the pool
        return b""


workers = WorkerPool()
atexit.register(workers.close)
os.register_at_fork(after_in_child=workers.after_fork)
