"""Grades one response as microsoft/rStar does. Runs inside the sandbox only, as a module (see `released`).

verl's prime_math evaluates the answer with `eval` and sympy's `parse_expr`, which calls `eval` too. Both names are replaced by
`evaluate`, which accepts an allow-list of syntax trees: whatever rewrites a text goes through before, no other code reaches the
interpreter. The process in which a response is graded has no stdout, so it cannot print a result.
"""

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import signal
import sys
import types
import unicodedata
from collections.abc import Callable
from typing import Any

STAGE_CPU_S = 2.0
MAX_DEPTH = 100  # of a syntax tree

_FUNCTIONS = """abs max min pow round sum int float complex sin cos tan cot sec csc asin acos atan arcsin arccos arctan sinh cosh
tanh log ln lg exp sqrt frac dfrac tfrac cbrt root gcd lcm mod binom floor ceil ceiling left right cdot times pi theta det text mathrm
ldots dots cup cap in"""
FUNCTIONS = frozenset(_FUNCTIONS.split())
# What sympy's parser writes around the parts of a formula, and the functions that a formula can call.
_FROM_TEXT = frozenset(("Symbol", "Integer", "Float", "Rational", "Function"))
_SYMPY = """Add Mul Pow Abs Max Min Mod Eq Ne Lt Le Gt Ge Tuple Matrix Interval Union FiniteSet factorial factorial2 binomial
sign re im conjugate arg asinh acosh atanh acot asec acsc"""
CALLS = FUNCTIONS | _FROM_TEXT | frozenset(_SYMPY.split())
NAMES = CALLS | {"E", "I", "oo", "zoo", "nan", "True", "False"}
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Tuple, ast.List, ast.Load, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip
# Letters, digits, brackets, operators and other signs that no Python code needs; no text, comment, slice or attribute.
_ARITHMETIC = re.compile(
    r"(?:[^\W_]|_(?!_)|[^\x00-\x7f]|[\\{})\[\]|,=<>+*/^!%&$~?\s-]|\.(?!\s*[^\W\d])|(?<=\d):(?![:=])|\((?!\s*\)))*+"
)
_CALL = re.compile(r"(?<!\\)\b([A-Za-z]\w*)\s*[(\[]")


class NotArithmetic(Exception):
    """A text is not evaluated, because its syntax tree has more than the allow-list."""


def has_code(text: str) -> bool:
    """Return whether a text has more than numbers, words, LaTeX commands, operators and calls of FUNCTIONS.

    Such a text is not graded by prime_math. The boundary is `checked`, which sees what is evaluated.
    """
    text = unicodedata.normalize("NFKC", text)
    if not _ARITHMETIC.fullmatch(text):
        return True
    return any(len(name) > 1 and name.lower() not in FUNCTIONS for name in _CALL.findall(text))


def checked(tree: ast.AST, depth: int = 0) -> None:
    """Raise NotArithmetic if a node of a syntax tree is not allowed.

    Allowed are numbers, operators, comparisons, tuples, lists, NAMES, and calls of CALLS. A text is allowed only as the
    argument with which sympy's parser makes a symbol, a number or a function.
    """
    if depth > MAX_DEPTH:
        raise NotArithmetic("too deep")
    if isinstance(tree, ast.Constant):
        if not isinstance(tree.value, bool | int | float | complex):
            raise NotArithmetic("a constant that is no number")
    elif isinstance(tree, ast.Name):
        if tree.id not in NAMES:
            raise NotArithmetic(f"the name {tree.id}")
    elif isinstance(tree, ast.Call):
        _check_call(tree, depth)
    elif isinstance(tree, _NODES):
        for child in ast.iter_child_nodes(tree):
            checked(child, depth + 1)
    else:
        raise NotArithmetic(type(tree).__name__)


def _check_call(call: ast.Call, depth: int) -> None:
    function, arguments = call.func, call.args
    if isinstance(function, ast.Call):  # f(x) is Function('f')(Symbol('x'))
        if not isinstance(function.func, ast.Name) or function.func.id != "Function":
            raise NotArithmetic("a call of a result")
        checked(function, depth + 1)
    elif not isinstance(function, ast.Name) or function.id not in CALLS:
        raise NotArithmetic("a call of another function")
    elif function.id in _FROM_TEXT and len(arguments) == 1 and isinstance(arguments[0], ast.Constant):
        if not isinstance(arguments[0].value, str | int | float):
            raise NotArithmetic("a constant that is no number")
        arguments = []
    for argument in arguments:
        checked(argument, depth + 1)
    for keyword in call.keywords:
        if keyword.arg != "evaluate" or not isinstance(keyword.value, ast.Constant):
            raise NotArithmetic("a keyword")


def evaluate(code: Any, names: dict[str, Any] | None = None, local_names: dict[str, Any] | None = None) -> Any:
    """Evaluate a Python expression that `checked` allows. Replaces `eval` in the graders.

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


_CHECKED = "<checked>"


def compile_checked(source: Any, *_: Any) -> types.CodeType:
    """Compile an expression that `checked` allows. Replaces `compile` in sympy's parser."""
    tree: Any = source if isinstance(source, ast.AST) else ast.parse(str(source).strip(), mode="eval")
    checked(tree)
    return compile(tree, _CHECKED, "eval")


def guard_parser() -> None:
    """Make sympy's parser evaluate only what `checked` allows."""
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
    return in_child(lambda: grade(model_output, ground_truth, list(GRADERS)))


def in_child(compute: Callable[[], float]) -> float:
    """Return a number that a forked child without stdin and stdout computes; 0.0 if it returns none."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            os.write(write_fd, str(int(compute())).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    os.waitpid(child, 0)
    os.set_blocking(read_fd, False)
    with contextlib.closing(os.fdopen(read_fd, "rb", 0)) as reply:
        return float(reply.read(1) == b"1")
