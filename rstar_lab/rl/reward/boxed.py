"""Graders that execute text of the model run as calls of a sandbox: the graders of microsoft/rStar.

verl's prime_math passes the model's answer to `eval` and to sympy's `parse_expr`. In the trainer's process, or in any process
with its user id, an answer could read files and keys, or change later rewards. The sandbox of this module is separate from
that of the tool calls and imports sympy once.
"""

import atexit
import importlib.util
import inspect
import json
import logging
import math
import os
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar_lab.common.blocking import LoopThread
from rstar_lab.common.errors import UserError, install_hint
from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Limits, LocalSandbox
from rstar_lab.sandbox.call import CallResult
from rstar_lab.sandbox.limits import MAX_TIMEOUT_S
from rstar_lab.verify import Undecided
from rstar_lab.verify.extraction import MAX_SEARCHED
from rstar_lab.verify.released import released_program

log = logging.getLogger(__name__)

PRELOAD = ("sympy", "sympy.parsing.sympy_parser", "sympy.parsing.latex", "pylatexenc.latex2text", "math_verify")
RELEASED = ("prime_math", "math_verify_response")
TIMEOUT_S = 6.0  # CPU seconds of a call; each of the two graders stops after 2
WORKERS = min(4, os.cpu_count() or 1)
_NUMBER = re.compile(r"-?\d{1,20}(?:\.\d{1,20})?(?:e[+-]?\d{1,3})?")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a grader in the sandbox returned.

    number: None if there is no finite number. failed_at_start: whether its module failed before it read any text.
    """

    number: float | None
    failed_at_start: bool
    outcome: Outcome
    stderr: str


class GraderBox:
    """A sandbox for graders, in a thread with an event loop of its own. Its methods can be called from any thread."""

    def __init__(self) -> None:
        self._thread = LoopThread("grader-box")
        self._sandbox = LocalSandbox(Limits(timeout_s=TIMEOUT_S), workers=WORKERS, preload=PRELOAD)

    def start(self) -> None:
        """Start the sandbox (imports sympy). Raises UserError if it cannot start."""
        try:
            self._thread.call(self._sandbox.start())
        except RuntimeError as error:
            raise UserError(f"rl.reward: the sandbox of the grader did not start: {error}") from error

    def run(self, program: str, stdin: str, timeout_s: float = TIMEOUT_S) -> CallResult:
        """Return the result of a program. Raises Undecided if the sandbox failed."""
        self.start()
        call = self._sandbox.run(program, stdin, seed=0, timeout_s=timeout_s)
        result: CallResult = self._thread.call(call)
        if result.outcome in (Outcome.SANDBOX_ERROR, Outcome.QUEUE_TIMEOUT):
            raise Undecided(f"the sandbox of the grader failed: {result.outcome.value}")
        return result

    def number(self, program: str, arguments: list[Any], timeout_s: float = TIMEOUT_S) -> Reply:
        """Return the number that a program of `child_program` computes for its arguments. Raises Undecided if the sandbox failed."""
        nonce = secrets.token_hex(16)
        result = self.run(program, f"{nonce} {json.dumps(arguments)}", timeout_s)
        words = result.stdout[: 2 * len(nonce) + 200].split()
        started = words[:2] == [nonce, "ready"]
        number = None
        if started and result.outcome is Outcome.OK and len(words) == 3 and _NUMBER.fullmatch(words[2]):
            number = float(words[2]) if math.isfinite(float(words[2])) else None
        return Reply(number, not started, result.outcome, result.stderr)

    def close(self) -> None:
        """End the processes of the sandbox."""
        with suppress(Exception):  # at the exit of the process; its processes end with it
            self._thread.call(self._sandbox.aclose(), timeout_s=10)
        self._thread.stop()


_lock = threading.Lock()
_box: GraderBox | None = None


def grader_box() -> GraderBox:
    """Return the sandbox of this process for graders. Created at the first call."""
    global _box
    with _lock:
        if _box is None:
            _box = GraderBox()
            atexit.register(_box.close)
        return _box


def _after_fork() -> None:
    global _box, _lock
    if _box is not None:
        atexit.unregister(_box.close)
    _box, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def released_grade(response_text: str, answer: str, *, graders: tuple[str, ...] = RELEASED) -> bool:
    """Return whether the graders of microsoft/rStar accept a response: verl's prime_math, else math-verify.

    They read the answer from the whole response and run inside a sandbox. An answer that contains Python code is not passed to
    prime_math.

    Args:
        response_text: The model's own text.
        answer: The true answer.
        graders: Names of the graders to try in order.

    Raises:
        UserError: Without verl and math-verify, or if the sandbox cannot start.
        Undecided: If the sandbox failed.
    """
    for package, extra in (("verl", "verl"), ("math_verify", "sandbox")):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"rl.reward: released requires {package}: {install_hint(extra)}")
    program = child_program(released_program(), "fused_compute_score", "grade")
    reply = grader_box().number(program, [response_text[-MAX_SEARCHED:], answer, list(graders)])
    return reply.number == 1.0


# The child executes SOURCE and computes the number. It starts before the parent reads stdin, so it never has the nonce, and it
# has no stdout: the parent prints what came through a pipe. The parent sends the arguments after it has printed `ready`, so
# that the model's text cannot make a call look like a module that does not run.
_CHILD_PROGRAM = """
import json, os, sys, traceback
request_r, request_w = os.pipe()
reply_r, reply_w = os.pipe()
child = os.fork()
if child == 0:
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(request_w)
        os.close(reply_r)
        module = type(sys)(MODULE)
        sys.modules[MODULE] = module
        exec(compile(SOURCE, MODULE, "exec"), module.__dict__)
        function = getattr(module, FUNCTION)
        os.write(reply_w, b"ready ")
        with os.fdopen(request_r) as request:
            arguments = json.load(request)
        os.write(reply_w, repr(float(function(*arguments))).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
os.close(request_r)
os.close(reply_w)
nonce, _, arguments = sys.stdin.read().partition(" ")
print(nonce, os.read(reply_r, 6).decode("ascii", "replace"), end="", flush=True)
try:
    with os.fdopen(request_w, "w") as request:
        request.write(arguments)
except BrokenPipeError:
    pass
os.waitpid(child, 0)
os.set_blocking(reply_r, False)
try:
    reply = os.read(reply_r, 100)
except BlockingIOError:
    reply = b""
print(reply.decode("ascii", "replace"))
"""


def child_program(source: str, module: str, function: str) -> str:
    """Return a program for `GraderBox.number` that calls a function of a module in a child process.

    Args:
        source: Text of the module.
        module: Its name.
        function: Name of a function of JSON values that returns a number.
    """
    return f"SOURCE = {source!r}\nMODULE = {module!r}\nFUNCTION = {function!r}\n{_CHILD_PROGRAM}"


def asks_for_sandbox(function: Any) -> bool:
    """Return whether a user's reward function has the attribute `sandbox = True`: it evaluates text of the model."""
    return getattr(function, "sandbox", False) is True


def boxed_function(name: str, function: Callable[..., Any], timeout_s: float) -> Callable[[str, str], float]:
    """Return a user's function of (text, answer) that runs as a sandbox call. Its module must be one file.

    The sandbox executes the module again; nothing that the trainer has imported or stored reaches it. An error of the function
    itself, a result that is no finite number, and a call that does not end give 0, because the model's text can cause them.

    Raises UserError if the module has no source file. A call raises UserError if the module fails in the sandbox.
    """
    file = inspect.getsourcefile(function)
    if file is None:
        raise UserError(f"rl.reward: {name}: sandbox = True requires a function in a Python file")
    program = child_program(Path(file).read_text(encoding="utf-8"), function.__module__, function.__qualname__)

    def reward(text: str, answer: str) -> float:
        reply = grader_box().number(program, [text, answer], min(timeout_s, MAX_TIMEOUT_S))
        if reply.failed_at_start:
            last = reply.stderr.strip().splitlines()[-1:] or [reply.outcome.value]
            raise UserError(f"rl.reward: {name}: its module does not run in the sandbox: {last[0]}")
        if reply.number is None:
            log.warning(
                "rl.reward: %s: no finite number from the sandbox (%s), counted as 0", name, reply.outcome.value
            )
        return reply.number or 0.0

    return reward
