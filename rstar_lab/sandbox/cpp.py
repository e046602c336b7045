"""Compiles and runs C++ programs inside the sandbox with a Python driver, which is an ordinary call.

The value of the driver's last expression states how the compiler and the program ended. The call's outcome is that of the
driver; `cpp_outcome` converts it.
"""

import ast
import math
import signal
from dataclasses import dataclass, replace

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox.call import Call, CallResult

COMPILE_TIMEOUT_S = 10.0
# By return code of the program. SIGKILL: the program killed itself; exceeding the memory limit ends the whole call.
OUTCOMES = {None: Outcome.TIMEOUT, 0: Outcome.OK, -signal.SIGKILL: Outcome.KILLED}

# Runs in the sandbox. The program inherits the driver's stdin, stdout and stderr; compiler errors are part of the value.
# The limit is on wall time minus the seconds in which the process was ready but did not get a CPU (at most `limit_s`). The kernel
# limits CPU seconds with SIGXCPU and SIGKILL, which a program can also send to itself.
DRIVER = """
import os, resource, signal, subprocess, time

def cpu_s():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime

def run_delay(pid):
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0

def timed(command, limit_s, **streams):
    started, used_s, most_s = time.monotonic(), cpu_s(), max(1, round(limit_s))
    limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
    process = subprocess.Popen(command, preexec_fn=limit, **streams)
    while True:
        left_s = limit_s + min(run_delay(process.pid), limit_s) - (time.monotonic() - started)
        if left_s <= 0:
            process.kill()
            process.wait()
            return None, time.monotonic() - started
        try:
            code = process.wait(left_s)
            exceeded = code in (-signal.SIGXCPU, -signal.SIGKILL) and cpu_s() - used_s > 0.9 * most_s
            return None if exceeded else code, time.monotonic() - started
        except subprocess.TimeoutExpired:
            pass

def build_and_run(source, compile_s, run_s):
    with open("source.cpp", "w", errors="surrogateescape") as file:
        file.write(source)
    command = ["g++", "-O2", "-o", "program", "source.cpp"]
    with open("errors", "w+b") as errors:
        try:
            code, seconds = timed(command, compile_s, stdin=subprocess.DEVNULL, stderr=errors)
        except FileNotFoundError:
            return None, None
        errors.seek(0)
        built = code, seconds, errors.read(8000).decode("utf-8", "replace")
    os.remove("errors")
    return built, timed(["./program"], run_s) if code == 0 else None

"""


@dataclass(frozen=True, slots=True)
class Command:
    """How the compiler or the program ended. return_code: None for a timeout, negative for a signal."""

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
    """Return the call that compiles and runs `source`.

    run_timeout_s: limit of the program, without compilation, in seconds of CPU time or sleep.
    """
    code = f"{DRIVER}build_and_run({source!r}, {compile_timeout_s!r}, {run_timeout_s!r})\n"
    return Call(code, stdin, timeout_s=compile_timeout_s + run_timeout_s + 1, memory_mb=memory_mb)


def commands(result: CallResult) -> tuple[Command | None, Command | None]:
    """Return how compiler and program ended, from the driver's value; None for one that did not run.

    A value that the driver does not write is a program that failed: without Landlock, it can change the driver's memory.
    """
    if result.outcome is not Outcome.OK:
        return None, None
    try:
        built, ran = (part if part is None else Command(*part) for part in ast.literal_eval(result.value or ""))
        for command in filter(None, (built, ran)):
            if not isinstance(command.return_code, int | None) or not math.isfinite(command.seconds + 0.0):
                raise ValueError("not a return code and seconds")
    except Exception:  # `literal_eval` raises errors of many types
        return Command(0, 0.0), Command(1, 0.0)
    return built, ran


def cpp_outcome(result: CallResult) -> CallResult:
    """Return the result of the C++ program, given the result of the driver's call."""
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
    outcome = OUTCOMES.get(ran.return_code, Outcome.EXCEPTION)
    return replace(result, outcome=outcome, value=None, duration_s=ran.seconds)
