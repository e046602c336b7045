"""Decide with sympy what numbers cannot: limits, integrals, infinite sums, equations and inequalities that are not linear.

Runs in the worker processes only: evaluation can hang. Formulas are those of `values`; no text is parsed here.
"""

import logging
import operator
from fractions import Fraction
from typing import Any

import sympy

from rstar_lab.verify.values import number

MAX_DIGITS, MAX_DEGREE, MAX_FACTORIAL = 100_000, 1_000, 10_000
MAX_SOLVED = 60  # operations of an equation that is solved

logging.disable(logging.CRITICAL)

_FUNCTIONS: dict[str, Any] = {
    "abs": sympy.Abs, "floor": sympy.floor, "ceil": sympy.ceiling, "factorial": sympy.factorial, "factorial2": sympy.factorial2,
    "binom": sympy.binomial, "gcd": sympy.gcd, "lcm": sympy.lcm, "max": sympy.Max, "min": sympy.Min, "mod": sympy.Mod, "ln": sympy.log,
    "perm": sympy.ff,
}  # fmt: skip
_CONSTANTS = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "inf": sympy.oo}


class NotSymbolic(Exception):
    """A formula has no form in sympy."""


def to_sympy(node: Any, decadic: bool = False) -> Any:
    """Return a formula as an expression of sympy. Raises NotSymbolic for others, and for values that are too large."""
    if not isinstance(node, tuple):
        raise NotSymbolic
    kind = node[0]
    if kind == "num":
        return sympy.Rational(node[1].numerator, node[1].denominator)
    if kind == "sym":
        return sympy.Symbol(node[1], real=True)
    if kind == "const":
        return _CONSTANTS[node[1]]
    if kind == "call" and node[1] == "det":
        return sympy.Matrix([[to_sympy(cell, decadic) for cell in row] for row in node[2].rows]).det()
    if kind in ("sum", "prod", "int", "lim"):
        return _bounded(node, decadic)
    if kind == "call":
        return _call(node[1], [to_sympy(part, decadic) for part in node[2:]], decadic)
    parts = [to_sympy(part, decadic) for part in node[1:]]
    if kind == "neg":
        return -parts[0]
    if kind == "deg":
        return parts[0] * sympy.pi / 180
    if kind not in _OPERATIONS:
        raise NotSymbolic
    return _OPERATIONS[kind](*parts)


def _power(base: Any, exponent: Any) -> Any:
    power = sympy.Pow(base, exponent, evaluate=False)
    if too_large(power):
        return power
    if isinstance(exponent, sympy.Rational) and exponent.q % 2 and exponent.q > 1 and base.is_extended_negative:
        return (-1) ** (exponent.p % 2) * (-base) ** exponent
    return base**exponent


_OPERATIONS: dict[str, Any] = {"+": operator.add, "*": operator.mul, "/": operator.truediv, "^": _power}


def _call(name: str, arguments: list[Any], decadic: bool) -> Any:
    if name == "root":
        return _power(arguments[0], 1 / arguments[1])
    if name == "log":
        base = arguments[1] if len(arguments) > 1 else sympy.Integer(10) if decadic else None
        return sympy.log(arguments[0]) if base is None else sympy.log(arguments[0], base)
    if name in ("factorial", "binom", "perm") and any(
        value.is_number and abs(value) > MAX_FACTORIAL for value in arguments
    ):
        return sympy.Function(name)(*arguments)
    if name.startswith("apply "):
        return sympy.Function(name.removeprefix("apply "))(*arguments)
    function = _FUNCTIONS.get(name) or getattr(sympy, name, None)
    if function is None:
        raise NotSymbolic
    return function(*arguments)


def _bounded(node: Any, decadic: bool) -> Any:
    if node[0] in ("sum", "prod"):
        kind, name, low, high, body = node
        if low is None or high is None:
            raise NotSymbolic
        index = sympy.Symbol(name, integer=True)
        content = to_sympy(body, decadic).subs(sympy.Symbol(name, real=True), index)
        return (sympy.Sum if kind == "sum" else sympy.Product)(content, (index, to_sympy(low), to_sympy(high)))
    if node[0] == "lim":
        return sympy.Limit(to_sympy(node[1], decadic), sympy.Symbol(node[2], real=True), to_sympy(node[3]))
    _, body, name, low, high = node
    variable = sympy.Symbol(name, real=True)
    limits = (variable,) if low is None else (variable, to_sympy(low), to_sympy(high))
    return sympy.Integral(to_sympy(body, decadic), limits)


def too_large(expression: Any) -> bool:
    """Return whether the exact value of an expression has more than MAX_DIGITS digits, so that it cannot be computed."""
    for node in sympy.preorder_traversal(expression):
        if isinstance(node, sympy.Pow) and node.exp.is_number:
            if isinstance(node.exp, sympy.Pow) and too_large(node.exp):
                return True
            if abs(node.exp.evalf(3)) > (MAX_DIGITS if node.base.is_number else MAX_DEGREE):
                return True
        elif isinstance(node, sympy.Sum | sympy.Product):
            _, low, high = node.limits[0]
            if low.is_number and high.is_number and (high - low).is_finite and high - low > MAX_FACTORIAL:
                return True
    return False


def formulas_equal(one: Any, two: Any, decadic: bool) -> bool:
    """Return whether sympy finds two formulas to be equal."""
    try:
        left, right = to_sympy(one, decadic), to_sympy(two, decadic)
    except NotSymbolic:
        return False
    if left == right:
        return True
    if too_large(left) or too_large(right):
        return False
    left, right = left.doit(), right.doit()
    infinite = sympy.oo in (left, right) or -sympy.oo in (left, right)
    if infinite or (isinstance(left, sympy.Rational) and isinstance(right, sympy.Rational)):
        return bool(left == right)
    if not left.free_symbols and not right.free_symbols:
        values = [value.evalf(50) for value in (left, right)]
        if all(value.is_Number for value in values):
            return bool(abs(values[0] - values[1]) <= max(abs(values[0]), abs(values[1])) * sympy.Float(10) ** -30)
    return bool(sympy.simplify(left - right) == 0)


def equations_equal(one: Any, two: Any) -> bool:
    """Return whether two equations, given as the differences of their sides, have the same solutions for one of their names."""
    try:
        first, second = to_sympy(one), to_sympy(two)
    except NotSymbolic:
        return False
    if max(first.count_ops(), second.count_ops()) > MAX_SOLVED or too_large(first) or too_large(second):
        return False
    for symbol in sorted(first.free_symbols, key=str):
        try:
            solutions = [sympy.solve(value, symbol) for value in (first, second)]
        except NotImplementedError:
            continue
        if not all(isinstance(found, list) and found for found in solutions) or len(solutions[0]) != len(solutions[1]):
            continue
        remaining = list(solutions[1])
        for value in solutions[0]:
            match = next((other for other in remaining if sympy.simplify(value - other) == 0), None)
            if match is None:
                break
            remaining.remove(match)
        else:
            return True
    return False


_RELATIONS = {"<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge, "=": sympy.Eq, "!=": sympy.Ne}


def solution(difference: Any, sign: str, name: str) -> list[Any] | None:
    """Return the intervals in which a formula is below, above or at zero; None if they are not found."""
    try:
        relation = _RELATIONS[sign](to_sympy(difference), 0)
        found = relation.as_set() if relation not in (True, False) else None
    except (NotSymbolic, NotImplementedError, TypeError, ValueError, AttributeError):
        return None
    parts = []
    for part in found.args if isinstance(found, sympy.Union) else [found]:
        if isinstance(part, sympy.FiniteSet):
            parts += [((_bound(value), True), (_bound(value), True)) for value in part]
        elif isinstance(part, sympy.Interval):
            parts.append(((_bound(part.start), not part.left_open), (_bound(part.end), not part.right_open)))
        else:
            return None
    return parts


def _bound(value: Any) -> Any:
    """Return a number of sympy as a formula."""
    if value in (sympy.oo, -sympy.oo):
        return ("const", "inf") if value == sympy.oo else ("neg", ("const", "inf"))
    if isinstance(value, sympy.Rational):
        return number(Fraction(int(value.p), int(value.q)))
    if value == sympy.pi:
        return ("const", "pi")
    if value == sympy.E:
        return ("const", "e")
    if isinstance(value, sympy.Add | sympy.Mul):
        parts = [_bound(part) for part in value.args]
        total = parts[0]
        for part in parts[1:]:
            total = ("+" if isinstance(value, sympy.Add) else "*", total, part)
        return total
    if isinstance(value, sympy.Pow):
        return ("^", _bound(value.base), _bound(value.exp))
    raise NotImplementedError
