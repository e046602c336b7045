"""Is this answer right? A leaf: nothing of the package is imported, and no sympy in the caller's process.

Integers and equal texts are decided here. All else goes to math-verify in a process of its own, because what a model
writes can be made to hang it or to eat all memory (`9^{9^{9^9}}`):

    caller ── socket ── fork server (math-verify imported once) ── forks ── workers, one answer at a time each

A worker arms kernel timers before each answer whose default action is death, so no cooperation of the hung code is
needed, and the closed socket is the verdict "not equal". Workers die with the fork server, and that with the caller,
however it dies.

Source of the rule: rStar2-Agent, section 2 (reward 1 exactly when the boxed answer inside the answer tags is equal to
the truth).
"""

import atexit
import contextlib
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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

TOTAL_S = 4.0  # from call to verdict, starting the fork server included
WALL_S, CPU_S = 3.0, 2.0  # one answer in a worker
MEMORY_BYTES = 2 << 30
MAX_WORKERS = 32  # hung ones among them: each lives WALL_S at most
IDLE_WORKERS = min(4, os.cpu_count() or 1)
MAX_EXPRESSION = 2_000  # characters; longer ones are compared as text
MAX_ANSWER_BLOCK = 50_000  # characters of an answer block that are searched, from its end

_log = logging.getLogger(__name__)


# --- what the model answered -----------------------------------------------------------------------------------------

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` whose braces balance (of nested ones the inner); None if there is none."""
    depths: list[int | None] = []  # of every open brace, where its box's content starts
    best: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        token = match[0]
        if token == "}":
            start = depths.pop() if depths else None
            if start is not None and (best is None or start > best[0]):
                best = (start, match.start())
        elif token == "{":
            depths.append(None)
        elif token.startswith("\\boxed"):
            depths.append(match.end())
    return text[slice(*best)] if best else None


def extract_answer(response_text: str) -> str | None:
    """The content of the last `\\boxed{}` in the last `<answer>…</answer>`; None where either is missing.

    Hand in the model's own text only: what tools printed must not count as its answer.
    """
    end = response_text.rfind("</answer>")
    start = response_text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start < 0:
        return None
    return last_boxed(response_text[max(start + len("<answer>"), end - MAX_ANSWER_BLOCK) : end])


# --- comparing -------------------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"([+-]?)0*([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)")


def as_integer(text: str) -> str | None:
    """Canonical digits of an integer written plainly ("025", "+7", "1,234"), without int()'s limits; None for all
    else."""
    match = _INTEGER.fullmatch(text)
    if not match:
        return None
    digits = match[2].replace(",", "").lstrip("0") or "0"
    return "-" + digits if match[1] == "-" and digits != "0" else digits


def _strip(text: str) -> str:
    text = text.strip()
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        text = text[1:-1].strip()
    return text


def same_answer(candidate: str, answer: str) -> bool:
    """Whether two answers (no tags, no box) are equal: as integers, as text, or to math-verify. At most 5 s, in any
    thread."""
    candidate, answer = _strip(candidate), _strip(answer)
    if not candidate or not answer:
        return False
    if candidate == answer:
        return True
    left, right = as_integer(candidate), as_integer(answer)
    if left is not None and right is not None:
        return left == right
    if max(len(candidate), len(answer)) > MAX_EXPRESSION:
        return False
    return _service.ask(candidate, answer)


def verify(response_text: str, answer: str) -> bool:
    """Whether the response's final answer equals `answer`. Any input is answered within 5 s, in any thread or event
    loop.

    Raises UserError if math-verify is not installed and the answers are neither integers nor equal texts.
    """
    candidate = extract_answer(response_text)
    return candidate is not None and same_answer(candidate, answer)


def verify_many(pairs: Iterable[tuple[str, str]], *, concurrency: int = IDLE_WORKERS) -> list[bool]:
    """`verify` for many (response_text, answer), in order; each is given its own 5 s."""
    with ThreadPoolExecutor(max(1, concurrency)) as threads:
        return list(threads.map(lambda pair: verify(*pair), pairs))


def warm_up(timeout_s: float = 60.0) -> None:
    """Start the fork server (1.5 s of one core) ahead of the first answer, whose 5 s would else have to do for it too.

    Raises UserError if it cannot be started.
    """
    if not _service.ask("1/2", "0.5", timeout_s):
        _fail(f"math-verify did not start within {timeout_s:g} s")


# --- the caller's side -----------------------------------------------------------------------------------------------


class _Service:
    """Hands answers to workers. Safe to call from any thread; a forked copy of the caller starts a service of its
    own."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_WORKERS)
        self._idle: list[socket.socket] = []
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def after_fork(self) -> None:
        inherited = [*self._idle, *([self._control] if self._control else [])]
        if self._process:
            self._process.returncode = 0  # the parent's child, not ours to wait for
        self._forget()
        for connection in inherited:
            connection.close()

    def ask(self, candidate: str, answer: str, timeout_s: float = TOTAL_S) -> bool:
        deadline = time.monotonic() + timeout_s
        slots = self._slots
        if not slots.acquire(timeout=timeout_s):
            return False
        try:
            # A worker may end for reasons of its own (its server was killed, say): what no timer ended is asked again, and
            # once more, for a killed server still takes requests while it dies.
            for fresh in (False, True, True):
                connection = self._connect(fresh, deadline)
                if connection is None:
                    continue
                asked = time.monotonic()
                try:
                    connection.sendall(json.dumps([candidate, answer]).encode() + b"\n")
                    verdict = _receive(connection, deadline)
                except OSError:
                    verdict = b""
                if verdict in (b"0", b"1"):
                    self._keep(connection)
                else:
                    connection.close()
                if verdict or time.monotonic() - asked >= CPU_S:
                    return verdict in (b"1", b"I")
            _log.warning(
                "no worker was ready within %g s to compare answers: counted as wrong (see warm_up)", timeout_s
            )
            return False
        finally:
            slots.release()

    def _keep(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._idle) < IDLE_WORKERS:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, fresh: bool, deadline: float) -> socket.socket | None:
        """A connection to a worker; None if the fork server is not up by the deadline."""
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
        # The worker says hello once it is forked; before the first hello the fork server is importing.
        try:
            hello = _receive(ours, deadline)
        except OSError:
            hello = b""
        if hello == b"h":
            return ours
        ours.close()
        if time.monotonic() < deadline:  # the connection ended: the worker died at birth, or with its server
            with self._lock:
                if self._control is control:
                    self._stop()
        return None

    def _stop(self) -> None:
        """Called with the lock held. Raises UserError if the fork server ended for want of math-verify."""
        process = self._process
        for connection in [*self._idle, *([self._control] if self._control else [])]:
            connection.close()
        self._idle, self._control, self._process = [], None, None
        if process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)  # without a control socket it ends by itself
            process.kill()
            if process.wait() == _NOT_INSTALLED:
                _fail("to compare answers other than integers: pip install 'rstar_lab[sandbox]' (math-verify)")

    def close(self) -> None:
        if self._lock.acquire(timeout=1.0):
            try:
                with contextlib.suppress(Exception):
                    self._stop()
            finally:
                self._lock.release()


def _fail(message: str) -> NoReturn:
    from rstar_lab.errors import UserError  # not at the head: the fork server runs this file by its path

    raise UserError(message)


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """One byte; empty at the end of the connection or past the deadline."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        return b""
    return connection.recv(1)


def _start_server() -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    ours, theirs = socket.socketpair()
    with theirs:
        # By path and with -P, so that it runs wherever the caller found the package and no neighbour shadows a module.
        # Nothing of the caller's terminal is inherited: a pipe held open would keep whoever reads the caller's output
        # waiting.
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
    return ours, process


_service = _Service()
atexit.register(_service.close)
os.register_at_fork(after_in_child=_service.after_fork)


# --- the fork server's side ------------------------------------------------------------------------------------------

_NOT_INSTALLED = 3
_ANSWERS_PER_WORKER = 1_000  # sympy's caches only grow


def _serve(control_fd: int, caller: int) -> None:
    import gc

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are reaped by the kernel
    control = socket.socket(fileno=control_fd)
    try:
        import math_verify  # noqa: F401
    except ImportError:
        os._exit(_NOT_INSTALLED)
    _equal("\\frac{1}{2}", "0.5")  # parsers build their tables once, here
    gc.collect()
    gc.freeze()
    while True:
        # The end of the socket tells that the caller is gone, unless a fork of it holds a copy: so look at the parent
        # too.
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
            _work(socket.socket(fileno=fds[0]), server)
        os.close(fds[0])


def _work(connection: socket.socket, server: int) -> None:
    import ctypes
    import resource

    ctypes.CDLL(None).prctl(
        1, signal.SIGKILL
    )  # PR_SET_PDEATHSIG; the fork server has one thread, so it means the process
    if os.getppid() != server:
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.sendall(b"h")
    questions = connection.makefile("rb")
    for count in range(1, _ANSWERS_PER_WORKER + 1):
        line = questions.readline()
        if not line:
            break
        candidate, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, WALL_S)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        sound = True
        try:
            verdict = _equal(candidate, answer)
        except (RecursionError, MemoryError):
            verdict, sound = False, False
        except Exception:  # whatever a parser raises on nonsense: it is not the answer
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sound = sound and count < _ANSWERS_PER_WORKER
        connection.sendall((b"1" if sound else b"I") if verdict else (b"0" if sound else b"O"))
        if not sound:
            break
    os._exit(0)


_EXPONENT = re.compile(r"(?<=[0-9.])[eE]([+-]?[0-9]+)(?![0-9A-Za-z])")
_THIN_SPACE = re.compile(r"(?<=[0-9])(?:\\[,;!]|\{,\})(?=[0-9]{3}(?![0-9]))")


def _normal(expression: str) -> str:
    return _THIN_SPACE.sub("", _EXPONENT.sub(r" \\times 10^{\1}", expression))


def _equal(candidate: str, answer: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
    from math_verify import verify as equal

    logging.disable(logging.CRITICAL)
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    answer, candidate = _normal(answer), _normal(candidate)
    # The kernel's timers above stand in for the library's own, which a long call in C ignores.
    truth = parse(answer if "$" in answer else f"${answer}$", targets, parsing_timeout=None)
    given = parse(f"\\boxed{{{candidate}}}", targets, parsing_timeout=None)
    return bool(truth) and bool(given) and bool(equal(truth, given, timeout_seconds=None))


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
