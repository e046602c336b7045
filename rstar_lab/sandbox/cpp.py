"""C++ programs: compiled and run inside the sandbox, by a small Python driver that is an ordinary call.

The driver's last expression tells what happened, so that the call's own outcome stays about the driver.
"""

import ast
from dataclasses import dataclass, replace

from rstar_lab.outcomes import Outcome
from rstar_lab.sandbox.call import Call, CallResult

COMPILE_TIMEOUT_S = 10.0

# Runs in the sandbox. The program keeps the driver's stdin, stdout and stderr; the compiler's words come in the value.
DRIVER = """
import os, resource, subprocess, time

def limit_cpu(seconds):
    return lambda: resource.setrlimit(resource.RLIMIT_CPU, (max(1, round(seconds)), max(1, round(seconds)) + 1))

def timed(command, cpu_s, wall_s, **streams):
    started = time.monotonic()
    try:
        done = subprocess.run(command, timeout=wall_s, preexec_fn=limit_cpu(cpu_s), **streams)
        code, words = done.returncode, done.stderr or b""
    except subprocess.TimeoutExpired as late:
        code, words = None, late.stderr or b""
    return code, time.monotonic() - started, words[:8000].decode("utf-8", "replace")

def build_and_run(source, compile_s, run_s):
    with open("source.cpp", "w", errors="surrogateescape") as file:
        file.write(source)
    command = ["g++", "-O2", "-o", "program", "source.cpp"]
    try:
        built = timed(command, compile_s, 2 * compile_s, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except FileNotFoundError:
        return None, None
    return built, timed(["./program"], run_s, 2 * run_s + 1) if built[0] == 0 else None

"""


@dataclass(frozen=True, slots=True)
class Command:
    """How one of the two commands ended. return_code: None for a time-out, negative for a signal."""

    return_code: int | None
    seconds: float
    stderr: str = ""


def cpp_call(
    source: str,
    stdin: str,
    *,
    run_timeout_s: float,
    compile_timeout_s: float = COMPILE_TIMEOUT_S,
    memory_mb: int | None = None,
) -> Call:
    """The call that compiles and runs `source`; `run_timeout_s` of CPU time for the program alone."""
    code = f"{DRIVER}build_and_run({source!r}, {compile_timeout_s!r}, {run_timeout_s!r})\n"
    return Call(code, stdin, timeout_s=compile_timeout_s + run_timeout_s + 1, memory_mb=memory_mb)


def commands(result: CallResult) -> tuple[Command | None, Command | None]:
    """The compiler and the program as the driver saw them; None for one that did not end (or start)."""
    if result.outcome is not Outcome.OK or result.value is None:
        return None, None
    built, ran = ast.literal_eval(result.value)
    return built and Command(*built), ran and Command(*ran)


def cpp_outcome(result: CallResult) -> CallResult:
    """The result of the C++ program, from the result of the driver's call."""
    built, ran = commands(result)
    if result.outcome is not Outcome.OK:
        return result
    if built is None:
        return replace(
            result, outcome=Outcome.SANDBOX_ERROR, value=None, stderr="g++ is not installed on this worker\n"
        )
    if ran is None:
        outcome = Outcome.TIMEOUT if built.return_code is None else Outcome.SYNTAX_ERROR
        return replace(result, outcome=outcome, value=None, stderr=built.stderr, duration_s=built.seconds)
    return replace(result, outcome=program_outcome(ran), value=None, duration_s=ran.seconds)


def program_outcome(ran: Command) -> Outcome:
    xcpu, kill = -24, -9
    if ran.return_code in (None, xcpu, kill):
        # The driver's own limits are the only killers in here: memory takes the whole call.
        return Outcome.TIMEOUT
    return Outcome.OK if ran.return_code == 0 else Outcome.EXCEPTION
