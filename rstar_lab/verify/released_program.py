"""Grades one response as microsoft/rStar does. Runs inside the sandbox only, as the text of a program (see `released`).

Reads {"response", "answer", "graders"} from stdin; prints 1 if a grader accepts the response, else 0. verl's prime_math
evaluates the answer with `eval` and sympy's `parse_expr`. So a text with code in it is not passed to prime_math: it could print
its own result.
"""

import builtins
import contextlib
import importlib
import importlib.util
import json
import re
import signal
import sys
import types

MATHS = {
    "abs", "max", "min", "pow", "round", "sum", "int", "float", "complex", "divmod", "set", "list", "tuple", "range",
}  # fmt: skip
NAMES = {name for name in dir(builtins) if name.islower() and name not in MATHS} | {
    "lambda",
    "import",
    "yield",
    "await",
}
_FUNCTIONS = """sin cos tan cot sec csc asin acos atan arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt frac dfrac tfrac
cbrt root gcd lcm mod binom floor ceil ceiling left right cdot times pi theta det text mathrm ldots dots cup cap in"""
FUNCTIONS = MATHS | set(_FUNCTIONS.split())
STAGE_CPU_S = 2.0


def has_code(text: str) -> bool:
    """Return whether Python could execute more than arithmetic in a text."""
    if re.search(r"__|['\"`@;]|:=|\.\s*[A-Za-z_]|\(\s*\)|\]\s*\(|\)\s*\.|[^\x00-\x7f]\s*\(", text):
        return True
    if any(name in NAMES for name in re.findall(r"(?<!\\)[A-Za-z_]\w*", text)):
        return True
    return any(len(name) > 1 and name.lower() not in FUNCTIONS for name in re.findall(r"([A-Za-z_]\w*)\s*\(", text))


def prime_math(response: str, answer: str) -> bool:
    """Grade with verl's prime_math, without verl itself, which imports torch."""

    class NoLimit(contextlib.ContextDecorator):  # the timer below is the limit
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
    functional.timeout_limit = NoLimit  # type: ignore[attr-defined]
    sys.modules[functional.__name__] = functional
    grader = importlib.import_module("verl.utils.reward_score.prime_math")
    if has_code(grader.match_answer(response)[1]) or has_code(answer):
        return False
    return bool(grader.compute_score(response, answer)[0])


def math_verify_response(response: str, answer: str) -> bool:
    """Grade a whole response as verl's math_verify does: any expression in it that equals the answer."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
    from math_verify import verify as expressions_equal

    truths = parse(f"\\boxed{{{answer}}}", [LatexExtractionConfig()], parsing_timeout=None)
    found = parse(response, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=None)
    return any(expressions_equal(truth, expression, timeout_seconds=None) for expression in found for truth in truths)


GRADERS = {"prime_math": prime_math, "math_verify_response": math_verify_response}


class OutOfTime(BaseException):
    """A grader has used its CPU time. Not an Exception: the graders catch those."""


def _out_of_time(*_: object) -> None:
    raise OutOfTime


def compute_score(model_output: str, ground_truth: str) -> float:
    """Return 1.0 if a grader accepts a response, else 0.0. Raises ImportError if no grader is installed."""
    missing = 0
    with contextlib.redirect_stdout(sys.stderr):
        for grader in GRADERS.values():
            try:
                if grader(model_output, ground_truth):
                    return 1.0
            except (ImportError, AssertionError):
                missing += 1
            except Exception:  # as in the release: the next grader decides
                pass
    if missing == len(GRADERS):
        raise ImportError(
            "fused_compute_score requires verl and math-verify in the sandbox: pip install 'rstar_lab[verl]'"
        )
    return 0.0


def main() -> None:
    request = json.loads(sys.stdin.read())
    stdout = sys.stdout
    accepted = False
    signal.signal(signal.SIGPROF, _out_of_time)
    with contextlib.redirect_stdout(sys.stderr):  # prime_math prints its errors
        for name in request["graders"]:
            signal.setitimer(signal.ITIMER_PROF, STAGE_CPU_S)
            try:
                accepted = accepted or GRADERS[name](request["response"], request["answer"])
            except BaseException:  # as in the release: the next grader decides
                pass
            signal.setitimer(signal.ITIMER_PROF, 0)
    print(int(accepted), file=stdout)


if __name__ == "__main__":
    main()
