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
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rstar_lab.common.blocking import LoopThread
from rstar_lab.common.errors import UserError
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

    def run(self, program: str, request: dict[str, Any], timeout_s: float = TIMEOUT_S) -> CallResult:
        """Return the result of a program with a request on its stdin. Raises Undecided if the sandbox failed."""
        self.start()
        call = self._sandbox.run(program, json.dumps(request), seed=0, timeout_s=timeout_s)
        result: CallResult = self._thread.call(call)
        if result.outcome in (Outcome.SANDBOX_ERROR, Outcome.QUEUE_TIMEOUT):
            raise Undecided(f"the sandbox of the grader failed: {result.outcome.value}")
        return result

    def close(self) -> None:
        """End the processes of the sandbox."""
        try:
            self._thread.call(self._sandbox.aclose(), timeout_s=10)
        except Exception:  # at the exit of the process; its processes end with it
            pass
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
            raise UserError(f"rl.reward: released requires {package}: pip install 'rstar_lab[{extra}]'")
    request = {"response": response_text[-MAX_SEARCHED:], "answer": answer, "graders": graders}
    return grader_box().run(released_program(), request).stdout.strip() == "1"


_USER_PROGRAM = """
import json, sys
stdout, sys.stdout = sys.stdout, sys.stderr
request = json.loads(sys.stdin.read())
module = {"__name__": request["module"]}
exec(compile(SOURCE, request["module"], "exec"), module)
function = module[request["function"]]
print("ready", file=stdout, flush=True)
result = function(request["text"], request["answer"])
print(json.dumps(float(result)), file=stdout)
"""


def asks_for_sandbox(function: Any) -> bool:
    """Return whether a user's reward function has the attribute `sandbox = True`: it evaluates text of the model."""
    return getattr(function, "sandbox", False) is True


def boxed_function(name: str, function: Callable[..., Any], timeout_s: float) -> Callable[[str, str], float]:
    """Return a user's function of (text, answer) that runs as a sandbox call. Its module must be one file.

    The sandbox executes the module again; nothing that the trainer has imported or stored reaches it. An error of the function
    itself gives 0, because the model's text can cause it.

    Raises UserError if the module has no source file. A call raises UserError if the module fails in the sandbox.
    """
    file = inspect.getsourcefile(function)
    if file is None:
        raise UserError(f"rl.reward: {name}: sandbox = True requires a function in a Python file")
    program = f"SOURCE = {Path(file).read_text(encoding='utf-8')!r}\n{_USER_PROGRAM}"
    identity = {"module": function.__module__, "function": function.__qualname__}

    def reward(text: str, answer: str) -> float:
        request = identity | {"text": text, "answer": answer}
        result = grader_box().run(program, request, min(timeout_s, MAX_TIMEOUT_S))
        lines = result.stdout.split("\n")
        if lines[0] != "ready":
            last = result.stderr.strip().splitlines()[-1:] or [result.outcome.value]
            raise UserError(f"rl.reward: {name}: its module does not run in the sandbox: {last[0]}")
        try:
            return float(json.loads(lines[1]))
        except (IndexError, ValueError):
            log.warning("rl.reward: %s: no reward from the sandbox (%s), counted as 0", name, result.outcome.value)
            return 0.0

    return reward
