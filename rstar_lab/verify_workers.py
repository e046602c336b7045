"""Worker processes that compare mathematical expressions with math-verify, under limits of time and memory.

    caller -- socket -- fork server (imports math-verify once) -- forks -- workers, one comparison at a time each

A worker arms kernel timers before each comparison. Their default action ends the process, so they also stop C code
that never returns to Python. The caller sees the closed socket and counts the answers as different. Workers end with
the fork server, and the fork server ends with the caller, also if the caller is killed.

This file runs as a script in the fork server and imports nothing of the package at module level.
"""

import atexit
import contextlib
import importlib.util
import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from typing import NoReturn

TOTAL_S = 4.0  # seconds for one comparison, including the start of the fork server
WALL_S, CPU_S = 3.0, 2.0  # seconds for one comparison inside a worker
MEMORY_BYTES = 2 << 30
MAX_WORKERS = 32  # includes workers that hang; each of them ends after WALL_S
IDLE_WORKERS = min(4, os.cpu_count() or 1)

# Environment variables of the fork server: only those that Python needs to start, so that it has none of the caller's
# secrets.
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")

_log = logging.getLogger(__name__)


class Undecided(Exception):
    """A comparison used up its slice of CPU time."""


# --- caller ----------------------------------------------------------------------------------------------------------


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
        inherited = [*self._idle, *([self._control] if self._control else [])]
        if self._process:
            self._process.returncode = 0  # a child of the parent process: this process cannot wait for it
        self._reset()
        for connection in inherited:
            connection.close()

    def warm_up(self, timeout_s: float = 60.0) -> None:
        """Start the fork server and one worker. Raises UserError if that takes longer than `timeout_s`."""
        if not self.compare("1/2", "0.5", timeout_s):
            _fail(f"math-verify did not start within {timeout_s:g} s")

    def compare(
        self,
        candidate: str,
        answer: str,
        timeout_s: float = TOTAL_S,
        slice_s: float | None = None,
        grader: str = "math_verify",
    ) -> bool:
        """Return whether a grader (see GRADERS) finds the two texts equal; False after `timeout_s`.

        slice_s: CPU seconds after which the comparison stops and raises Undecided, so that a caller can compare other
        pairs first.
        Raises UserError if math-verify is not installed.
        """
        cpu_s = CPU_S if slice_s is None else slice_s
        deadline = time.monotonic() + timeout_s
        slots = self._slots
        if not slots.acquire(timeout=timeout_s):
            return False
        try:
            # A worker can end for another reason than its timers, for example because its server was killed. Such a
            # comparison is repeated; twice, because a dying server still accepts requests.
            for fresh in (False, True, True):
                connection = self._connect(fresh, deadline)
                if connection is None:
                    continue
                started = time.monotonic()
                try:
                    connection.sendall(json.dumps([candidate, answer, cpu_s, grader]).encode() + b"\n")
                    reply = _receive(connection, deadline)
                except OSError:
                    reply = b""
                if reply in (b"0", b"1"):
                    self._return_to_pool(connection)
                else:
                    connection.close()
                if reply:
                    return reply in (b"1", b"I")
                if time.monotonic() - started >= cpu_s:
                    if slice_s is not None:
                        raise Undecided
                    return False
            _log.warning(
                "no worker was ready within %g s to compare answers; counted as different (see warm_up)", timeout_s
            )
            return False
        finally:
            slots.release()

    def _return_to_pool(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._idle) < IDLE_WORKERS:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, fresh: bool, deadline: float) -> socket.socket | None:
        """Return a connection to a worker, or None if the fork server is not ready by the deadline."""
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
        # The worker sends b"h" when it is ready. The first one waits for the fork server's imports.
        try:
            ready = _receive(ours, deadline)
        except OSError:
            ready = b""
        if ready == b"h":
            return ours
        ours.close()
        if time.monotonic() < deadline:  # the connection closed: the worker or its server ended
            with self._lock:
                if self._control is control:
                    self._stop()
        return None

    def _stop(self) -> None:
        """Stop the fork server; call with the lock held. Raises UserError if it ended because math-verify is missing."""
        process = self._process
        for connection in [*self._idle, *([self._control] if self._control else [])]:
            connection.close()
        self._idle, self._control, self._process = [], None, None
        if process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)  # it ends by itself when the control socket closes
            process.kill()
            if process.wait() == _NOT_INSTALLED:
                _fail("comparing answers other than integers requires math-verify: pip install 'rstar_lab[sandbox]'")

    def close(self) -> None:
        if self._lock.acquire(timeout=1.0):
            try:
                with contextlib.suppress(Exception):
                    self._stop()
            finally:
                self._lock.release()


def _fail(message: str) -> NoReturn:
    from rstar_lab.errors import UserError  # imported here because the fork server runs this file as a script

    raise UserError(message)


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
            [sys.executable, "-P", __file__, str(theirs.fileno()), str(os.getpid())],
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


# --- fork server and workers -----------------------------------------------------------------------------------------

_NOT_INSTALLED = 3
_COMPARISONS_PER_WORKER = 1_000  # sympy's caches grow without limit


def _run_server(control_fd: int, caller: int) -> None:
    import gc

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    control = socket.socket(fileno=control_fd)
    try:
        import math_verify  # noqa: F401
    except ImportError:
        os._exit(_NOT_INSTALLED)
    _equal("\\frac{1}{2}", "0.5")  # build the parser tables once, before the forks
    gc.collect()
    gc.freeze()
    while True:
        # The socket closes when the caller ends, except if a fork of the caller holds a copy. So check the parent too.
        ready, _, _ = select.select([control], [], [], 1.0)
        if os.getppid() != caller:
            os._exit(0)
        if not ready:
            continue
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os._exit(0)
        server = os.getpid()
        if os.fork() == 0:
            control.close()
            _run_worker(socket.socket(fileno=fds[0]), server)
        os.close(fds[0])


def _run_worker(connection: socket.socket, server: int) -> None:
    import ctypes
    import resource

    ctypes.CDLL(None).prctl(
        1, signal.SIGKILL
    )  # PR_SET_PDEATHSIG: end with the parent. The fork server has one thread, so its thread is the process.
    if os.getppid() != server:
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.sendall(b"h")
    requests = connection.makefile("rb")
    for count in range(1, _COMPARISONS_PER_WORKER + 1):
        line = requests.readline()
        if not line:
            break
        candidate, answer, cpu_s, grader = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, WALL_S)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        reusable = True
        try:
            equal = GRADERS[grader](candidate, answer)
        except (RecursionError, MemoryError):
            equal, reusable = False, False
        except Exception:  # parsers raise all kinds of errors on malformed input
            equal = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        reusable = reusable and count < _COMPARISONS_PER_WORKER
        connection.sendall((b"1" if reusable else b"I") if equal else (b"0" if reusable else b"O"))
        if not reusable:
            break
    os._exit(0)


_EXPONENT = re.compile(r"(?<=[0-9.])[eE]([+-]?[0-9]+)(?![0-9A-Za-z])")
_THIN_SPACE = re.compile(r"(?<=[0-9])(?:\\[,;!]|\{,\})(?=[0-9]{3}(?![0-9]))")


def _normalize(expression: str) -> str:
    return _THIN_SPACE.sub("", _EXPONENT.sub(r" \\times 10^{\1}", expression))


def _equal(candidate: str, answer: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
    from math_verify import verify as expressions_equal

    logging.disable(logging.CRITICAL)
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    answer, candidate = _normalize(answer), _normalize(candidate)
    # The library's own time limits are off: they do not interrupt C code. The kernel timers above do.
    truth = parse(answer if "$" in answer else f"${answer}$", targets, parsing_timeout=None)
    given = parse(f"\\boxed{{{candidate}}}", targets, parsing_timeout=None)
    return bool(truth) and bool(given) and bool(expressions_equal(truth, given, timeout_seconds=None))


def _prime_math(response: str, answer: str) -> bool:
    """Grade a whole response with verl's prime_math, without verl itself, which imports torch."""
    if "verl" not in sys.modules:

        class _NoLimit(contextlib.ContextDecorator):  # the kernel timers are the limit
            def __init__(self, *values: object, **named: object): ...
            def __enter__(self) -> None: ...
            def __exit__(self, *error: object) -> None: ...

        spec = importlib.util.find_spec("verl")
        assert spec is not None and spec.submodule_search_locations is not None
        root = next(iter(spec.submodule_search_locations))
        for name in ("", ".utils", ".utils.reward_score"):
            package = types.ModuleType(f"verl{name}")
            package.__path__ = [root + name.replace(".", "/")]
            sys.modules[package.__name__] = package
        functional = types.ModuleType("verl.utils.py_functional")
        functional.timeout_limit = _NoLimit  # type: ignore[attr-defined]
        sys.modules[functional.__name__] = functional
    grader = importlib.import_module("verl.utils.reward_score.prime_math")
    return bool(grader.compute_score(response, answer)[0])


def _math_verify_response(response: str, answer: str) -> bool:
    """Grade a whole response as verl's math_verify does: any expression in it that equals the answer."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
    from math_verify import verify as expressions_equal

    logging.disable(logging.CRITICAL)
    truths = parse(f"\\boxed{{{answer}}}", [LatexExtractionConfig()], parsing_timeout=None)
    found = parse(response, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=None)
    return any(expressions_equal(truth, expression, timeout_seconds=None) for expression in found for truth in truths)


def _released(response: str, answer: str) -> bool:
    """Grade a whole response as microsoft/rStar does: prime_math, and math-verify if that finds it wrong or fails."""
    try:
        if _prime_math(response, answer):
            return True
    except Exception:  # as in the release
        pass
    return _math_verify_response(response, answer)


# By name: functions of (expression or response, answer).
GRADERS = {
    "math_verify": _equal,
    "prime_math": _prime_math,
    "math_verify_response": _math_verify_response,
    "released": _released,
}


if __name__ == "__main__":
    _run_server(int(sys.argv[1]), int(sys.argv[2]))
