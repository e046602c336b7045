"""Decide with sympy what numbers cannot: limits, integrals, infinite sums, equations and inequalities that are not linear.

Runs in the worker processes only: evaluation can hang. Formulas are those of `values`; no text is parsed here.
"""

import logging
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import sympy

from rstar_lab.verify.numeric import from_digits
from rstar_lab.verify.values import number

MAX_DIGITS, MAX_DEGREE, MAX_FACTORIAL = 100_000, 1_000, 10_000
MAX_SOLVED = 60  # operations of an equation that is solved

logging.disable(logging.CRITICAL)


class NotSymbolic(Exception):
    """A formula has no form in sympy."""


def to_sympy(node: Any) -> Any:
    """Return a formula as an expression of sympy. Raises NotSymbolic for others, and for values that are too large."""
    if not isinstance(node, tuple):
        raise NotSymbolic
    kind = node[0]
    if kind == "num":
        return sympy.Rational(node[1].numerator, node[1].denominator)
    if kind == "sym":
        return sympy.Symbol(node[1], real=True)
    if kind == "const":
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "inf": sympy.oo}[node[1]]
    if kind in ("sum", "prod", "int", "lim"):
        return _bounded(node)
    if kind == "call" and node[1] == "det":
        return sympy.Matrix([[to_sympy(cell) for cell in row] for row in node[2].rows]).det()
    if kind == "call":
        return _function(node[1])(*map(to_sympy, node[2:]))
    if kind not in _OPERATIONS:
        raise NotSymbolic
    return _OPERATIONS[kind](*map(to_sympy, node[1:]))


def _power(base: Any, exponent: Any) -> Any:
    power = sympy.Pow(base, exponent, evaluate=False)
    if too_large(power):
        return power
    if isinstance(exponent, sympy.Rational) and exponent.q % 2 and exponent.q > 1 and base.is_extended_negative:
        return (-1) ** (exponent.p % 2) * (-base) ** exponent
    return base**exponent


_OPERATIONS: dict[str, Any] = {
    "+": operator.add, "*": operator.mul, "/": operator.truediv, "^": _power, "neg": operator.neg,
    "deg": lambda value: value * sympy.pi / 180,
}  # fmt: skip
_FUNCTIONS: dict[str, Any] = {
    "abs": sympy.Abs, "ceil": sympy.ceiling, "max": sympy.Max, "min": sympy.Min, "mod": sympy.Mod, "ln": sympy.log,
    "root": lambda value, degree: _power(value, 1 / degree),
}  # fmt: skip
_GROWING: dict[str, Any] = {"factorial": sympy.factorial, "binom": sympy.binomial, "perm": sympy.ff}


def _function(name: str) -> Callable[..., Any]:
    if name.startswith("apply "):
        return sympy.Function(name.removeprefix("apply "))
    if name in _GROWING:

        def growing(*values: Any) -> Any:
            large = any(value.is_number and abs(value) > MAX_FACTORIAL for value in values)
            return (sympy.Function(name) if large else _GROWING[name])(*values)

        return growing
    function = _FUNCTIONS.get(name) or getattr(sympy, name, None)
    if function is None:
        raise NotSymbolic
    return function


def _bounded(node: Any) -> Any:
    if node[0] == "lim":
        return sympy.Limit(to_sympy(node[1]), sympy.Symbol(node[2], real=True), to_sympy(node[3]))
    if node[0] == "int":
        _, body, name, low, high = node
        variable = sympy.Symbol(name, real=True)
        return sympy.Integral(to_sympy(body), variable if low is None else (variable, to_sympy(low), to_sympy(high)))
    kind, name, low, high, body = node
    index = sympy.Symbol(name, integer=True)
    content = to_sympy(body).subs(sympy.Symbol(name, real=True), index)
    return (sympy.Sum if kind == "sum" else sympy.Product)(content, (index, to_sympy(low), to_sympy(high)))


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


def formulas_equal(one: Any, two: Any) -> bool:
    """Return whether sympy finds two formulas to be equal."""
    try:
        left, right = to_sympy(one), to_sympy(two)
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
        equations = to_sympy(one), to_sympy(two)
    except NotSymbolic:
        return False
    if any(equation.count_ops() > MAX_SOLVED or too_large(equation) for equation in equations):
        return False
    return any(_same_solutions(*equations, symbol) for symbol in sorted(equations[0].free_symbols, key=str))


def _same_solutions(one: Any, two: Any, symbol: Any) -> bool:
    try:
        first, second = (sympy.solve(equation, symbol) for equation in (one, two))
    except NotImplementedError:
        return False
    if not isinstance(first, list) or not first or not isinstance(second, list) or len(first) != len(second):
        return False
    return all(any(sympy.simplify(value - other) == 0 for other in second) for value in first)


_RELATIONS = {"<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge, "=": sympy.Eq, "!=": sympy.Ne}


def boundary(difference: Any, sign: str) -> list[Any] | None:
    """Return the numbers at which the set begins or ends where a formula is below, above or at zero; None if unknown."""
    try:
        relation = _RELATIONS[sign](to_sympy(difference), 0)
        found = relation.as_set().boundary
        if not isinstance(found, sympy.FiniteSet):
            return [] if found is sympy.S.EmptySet else None
        return [_bound(value) for value in found]
    except (NotSymbolic, NotImplementedError, TypeError, ValueError, AttributeError):
        return None


def _bound(value: Any) -> Any:
    if isinstance(value, sympy.Rational):
        return number(Fraction(int(value.p), int(value.q)))
    return ("value", from_digits(str(value.evalf(50))))
