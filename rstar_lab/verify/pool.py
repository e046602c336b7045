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

MAX_WORKERS = 32  # includes workers with a comparison that hangs; each of them ends after worker.CPU_S of CPU time
IDLE_WORKERS = min(4, os.cpu_count() or 1)
# Wall-clock limit of a comparison, all repetitions included: only a machine that gives a worker less than 1% of a core for
# two minutes reaches it.
GIVE_UP_S = 120.0

# Environment variables of the fork server: only those that Python needs to start, so that it has none of the caller's
# secrets.
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")

_log = logging.getLogger(__name__)


class Undecided(UserError):
    """A comparison has no result: it ran out of its time slice, or the machine gave it no worker or no CPU time."""

    def __init__(self, message: str = "the answer could not be compared: the machine gave the comparison no CPU time"):
        super().__init__(message)


class WorkerPool:
    """Sends comparisons to worker processes. Thread-safe. A forked copy of the caller starts its own processes."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_WORKERS)
        self._idle: list[socket.socket] = []
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def after_fork(self) -> None:
        """Forget the processes of the parent, which the child cannot wait for."""
        inherited = [*self._idle, *([self._control] if self._control else [])]
        if self._process:
            self._process.returncode = 0
        self._reset()
        for connection in inherited:
            connection.close()

    def warm_up(self, timeout_s: float = 60.0) -> None:
        """Start the fork server and one worker. Raises UserError if that takes longer than `timeout_s`."""
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
        cpu_s = worker.CPU_S if slice_s is None else slice_s
        deadline = time.monotonic() + timeout_s
        request = json.dumps([candidate, answer, cpu_s]).encode() + b"\n"
        slots = self._slots
        if not slots.acquire(timeout=timeout_s):
            raise Undecided
        try:
            crashes, fresh = 0, False
            while time.monotonic() < deadline:
                reply = self._ask(request, fresh, deadline)
                if reply == worker.OUT_OF_TIME:
                    if slice_s is not None:
                        raise Undecided
                    return False
                if reply == worker.CRASHED:
                    crashes += 1
                    if crashes == 2:
                        return False
                elif reply:
                    return reply in (worker.EQUAL, worker.EQUAL_LAST)
                fresh = True  # the worker or its server was killed: repeat the comparison in a new one
            raise Undecided
        finally:
            slots.release()

    def _ask(self, request: bytes, fresh: bool, deadline: float) -> bytes:
        """Return the reply of a worker, or b"" if there was none."""
        connection = self._connect(fresh, deadline)
        if connection is None:
            time.sleep(min(0.05, max(0.0, deadline - time.monotonic())))
            return b""
        try:
            connection.sendall(request)
            reply = _receive(connection, deadline)
        except OSError:
            reply = b""
        if reply in (worker.EQUAL, worker.DIFFERENT):
            self._return_to_pool(connection)
        else:
            connection.close()
        return reply

    def _return_to_pool(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._idle) < IDLE_WORKERS:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, fresh: bool, deadline: float) -> socket.socket | None:
        """Return a connection to a worker, or None if there was none by the deadline or the fork server ended."""
        with contextlib.ExitStack() as stack:
            if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return None
            stack.callback(self._lock.release)
            if self._idle and not fresh:
                return self._idle.pop()
            for _ in range(2):
                if self._control is None:
                    self._control, self._process = _start_server()
                ours, theirs = socket.socketpair()
                with theirs:
                    try:
                        socket.send_fds(self._control, [b"w"], [theirs.fileno()])
                        break
                    except OSError:  # the fork server was killed
                        ours.close()
                        self._stop()
            else:
                return None
            control = self._control
        # The worker sends READY. The first one waits for the fork server's imports.
        try:
            ready = _receive(ours, deadline)
        except OSError:
            ready = b""
        if ready == worker.READY:
            return ours
        ours.close()
        if time.monotonic() < deadline:  # the connection closed: the worker or its server ended
            with self._lock:
                if self._control is control:
                    self._stop()
        return None

    def _stop(self) -> None:
        """Stop the fork server; call with the lock held. Raises UserError if it ended because sympy is missing."""
        process = self._process
        for connection in [*self._idle, *([self._control] if self._control else [])]:
            connection.close()
        self._idle, self._control, self._process = [], None, None
        if process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)  # it ends by itself when the control socket closes
            process.kill()
            if process.wait() == worker.NOT_INSTALLED:
                raise UserError(f"comparing answers other than numbers requires sympy: {install_hint('sandbox')}")

    def close(self) -> None:
        """Stop the fork server and its workers."""
        if self._lock.acquire(timeout=1.0):
            try:
                with contextlib.suppress(Exception):
                    self._stop()
            finally:
                self._lock.release()


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """Return one byte, or b"" if the connection closed or the deadline passed."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        return b""
    return connection.recv(1)


def _start_server() -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    ours, theirs = socket.socketpair()
    with theirs:
        # Run by path and with -P: this finds the same package as the caller, and no file beside it shadows a module.
        # Standard streams are not inherited: an open pipe would block a process that reads the caller's output.
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(worker.__file__)), str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | {"PYTHONHASHSEED": "0"},
        )
    return ours, process


workers = WorkerPool()
atexit.register(workers.close)
os.register_at_fork(after_in_child=workers.after_fork)
