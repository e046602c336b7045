"""Grades one response as microsoft/rStar does. Runs inside the sandbox only, as a module (see `released`).

verl's prime_math evaluates the answer with `eval` and sympy's `parse_expr`, which calls `eval` too. Both names are replaced by
`evaluate`, which accepts an allow-list of names: whatever rewrites a text goes through before, no other code reaches the
interpreter.
"""

import ast
import contextlib
import importlib
import importlib.util
import io
import signal
import sys
import types
from typing import Any

STAGE_CPU_S = 2.0

_NAMES = """abs max min pow round sum int float complex sin cos tan cot sec csc asin acos atan arcsin arccos arctan sinh cosh
tanh log ln lg exp sqrt frac dfrac tfrac cbrt root gcd lcm mod binom floor ceil ceiling left right cdot times pi theta det text mathrm
ldots dots cup cap in Symbol Integer Float Rational Function Add Mul Pow Abs Max Min Mod Eq Ne Lt Le Gt Ge Tuple Matrix Interval Union
FiniteSet factorial factorial2 binomial sign re im conjugate arg asinh acosh atanh acot asec acsc E I oo zoo nan"""
NAMES = frozenset(_NAMES.split())
_CHECKED = "<checked>"


class NotArithmetic(Exception):
    """A text is not evaluated, because it uses more than the allow-list."""


def compile_checked(source: Any, *_: Any) -> types.CodeType:
    """Compile an expression of numbers, operators and NAMES. Replaces `compile` in sympy's parser.

    Attributes and variables are names too. A text can only reach sympy's parser, which is guarded by this function.

    Args:
        source: Its text or syntax tree.
    """
    expression: Any = source if isinstance(source, ast.AST) else str(source).strip()
    code: types.CodeType = compile(expression, _CHECKED, "eval")
    if other := set(code.co_names) - NAMES:
        raise NotArithmetic(f"the name {min(other)}")
    if any(isinstance(constant, types.CodeType) for constant in code.co_consts):
        raise NotArithmetic("a function or a comprehension")
    return code


def evaluate(code: Any, names: dict[str, Any] | None = None, local_names: dict[str, Any] | None = None) -> Any:
    """Evaluate a Python expression that `compile_checked` accepts. Replaces `eval` in the graders.

    Args:
        code: Its text, or a code object that `compile_checked` made.
        names: Global names.
        local_names: Local names.
    """
    if not isinstance(code, types.CodeType):
        code = compile_checked(code)
    elif code.co_filename != _CHECKED:
        raise NotArithmetic("a code object of others")
    return eval(code, {} if names is None else names, local_names)


def guard_parser() -> None:
    """Make sympy's parser evaluate only what `compile_checked` accepts."""
    parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    parser.eval, parser.compile = evaluate, compile_checked


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
    importlib.import_module("verl.utils.reward_score.prime_math.grader").eval = evaluate  # type: ignore[attr-defined]
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


def grade(response: str, answer: str, graders: list[str]) -> float:
    """Return 1.0 if one of the graders accepts a response, else 0.0. Each has STAGE_CPU_S seconds of CPU time."""
    signal.signal(signal.SIGPROF, _out_of_time)
    guard_parser()
    for name in graders:
        signal.setitimer(signal.ITIMER_PROF, STAGE_CPU_S)
        try:
            if GRADERS[name](response, answer):
                return 1.0
        except BaseException:  # as in the release: the next grader decides
            pass
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return 0.0


def compute_score(model_output: str, ground_truth: str) -> float:
    """Return 1.0 if a grader accepts a response, else 0.0. Raises ImportError if no grader is installed."""
    if not any(importlib.util.find_spec(package) for package in ("verl", "math_verify")):
        raise ImportError("fused_compute_score requires verl and math-verify in the sandbox: install the extra `verl`")
    with contextlib.redirect_stdout(io.StringIO()):  # the caller prints the score
        return grade(model_output, ground_truth, list(GRADERS))
