"""Values of formulas, and formulas with equal values. No text is evaluated, and no value is large.

Values are exact fractions where arithmetic is exact, else they have 150 digits. Two formulas with letters are equal if their values
agree at several points; with roots or pieces, such as `|x-3|`, there are points on both sides of each number in them. The steps of
a comparison are counted and limited, so its result does not depend on the machine.
"""

import math
import operator
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from itertools import count
from typing import Any

import mpmath

from rstar_lab.verify.units import TABLES
from rstar_lab.verify.values import Formula, decadic, has, nodes, number, operands, replaced, symbols

MAX_STEPS = 100_000  # of a comparison: about 0.5 s
STEP_BITS = 500  # of an exact number: arithmetic with more takes more steps
FUNCTION_STEPS = 10  # steps that a function with rounded values takes
TERM_STEPS = 50  # steps that a term of an infinite sum or a limit takes
MAX_TERMS = 200  # of an infinite sum or a limit: the extrapolation of more is slow
MAX_BITS = 40_000  # of an exact number
MAX_MAGNITUDE = 1e6  # of the logarithm of a number that is not exact
MAX_ARGUMENT = 2_000  # of a factorial
TAIL = 1_000  # beyond it, an integrand whose size cannot be computed is 0
INFINITY = ("const", "inf")
NOISE_BITS = 20  # of a value, which rounding errors can change
MIN_DECIMALS = MIN_SIGNIFICANT = 6
MIN_AGREED = 3  # points at which formulas have the same value
_CONTEXT = mpmath.mp.clone()
_CONTEXT.dps, LIMIT_DIGITS = 150, 50  # digits of values, and of limits, integrals and infinite sums
AGREEMENT, LIMIT_AGREEMENT = _CONTEXT.mpf(10) ** -90, _CONTEXT.mpf(10) ** -35
# Rational points of both signs, whose odd denominators keep odd roots real; integers for names of integers in formulas with steps.
POINTS = tuple(Fraction(p, q) for p, q in ((7, 5), (3, 23), (-11, 7), (29, 17), (-5, 13), (8, 19), (17, 61), (-37, 31)))
INTEGERS = tuple(Fraction(n) for n in (7, 13, 29, 18, 58, 101, 3, 46))
FAR = tuple(sign * (n + Fraction(1, 3)) for n in (*range(1, 13), 14, 17, 20, 25, 31, 40, 50) for sign in (1, -1))
FAR_INTEGERS = tuple(Fraction(sign * n) for n in (*range(25), 30, 60, 97, 1_000, 1_000_003) for sign in (1, -1))

Number = Any  # Fraction, mpf or mpc

_ACCURACY = _CONTEXT.mpf(10) ** -40  # of an integral
_LOCK = threading.Lock()  # one comparison at a time: functions of mpmath change the precision of their context
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
_left, _agreement = 0, AGREEMENT  # of the comparison: its steps, and the difference of values that counts as none


class NotComputed(Exception):
    """A formula has a value that is not computed here, or the comparison has used its steps."""


class NoValue(Exception):
    """A formula has no value at a point, such as 1/0."""


@contextmanager
def comparison() -> Iterator[None]:
    """Give the comparison in this context its steps. Values are computed in such a context only."""
    global _left, _agreement
    with _LOCK:
        _left, _agreement = MAX_STEPS, AGREEMENT
        yield


def spend(steps: int) -> None:
    """Use steps of the comparison. Raises NotComputed if too few are left."""
    global _left
    _left -= steps
    if _left < 0:
        raise NotComputed


def evaluate(node: Any, values: dict[str, Fraction]) -> Number:
    """Return the value of a formula.

    Args:
        node: The formula.
        values: Values of its names.

    Raises:
        NotComputed: For large numbers, and limits, integrals and infinite sums that do not converge fast.
        NoValue: If it has no value.
    """
    spend(1)
    if not isinstance(node, tuple):
        raise NotComputed
    kind = node[0]
    if kind in ("num", "value"):
        return node[1]
    if kind == "sym" and node[1] in values:
        return values[node[1]]
    if kind == "const":
        if node[1] == "inf":
            raise NoValue
        return _CONSTANTS[node[1]]
    if kind in ("sum", "prod"):
        return _bounded(node, values)
    if kind in ("int", "lim"):
        return _extrapolated(node, values)
    if kind == "call":
        function = _FUNCTIONS.get(node[1]) or (partial(_applied, node[1]) if node[1].startswith("apply ") else None)
        parts = node[2:]
    else:
        function, parts = _OPERATIONS.get(kind), node[1:]
    if function is None:
        raise NotComputed
    return function(*[evaluate(part, values) for part in parts])


def real(value: Number) -> Any:
    """Return a value as mpf, or raise NoValue if it is complex."""
    value = _inexact(value)
    if isinstance(value, _CONTEXT.mpc):
        if value.imag != 0:
            raise NoValue
        return value.real
    return value


def as_fraction(value: Number) -> Fraction:
    """Return a value as a fraction, rounded if it is not exact. Raises NoValue if it is complex."""
    if isinstance(value, Fraction):
        return value
    sign, mantissa, exponent, _ = real(value)._mpf_
    return Fraction((-1) ** sign * int(mantissa)) * Fraction(2) ** exponent


def polynomial_roots(coefficients: Sequence[Number]) -> list[Number]:
    """Return the roots of a polynomial without multiple ones. coefficients: the constant first."""
    spend(100 * FUNCTION_STEPS * len(coefficients))
    try:
        return list(_CONTEXT.polyroots(list(map(_inexact, coefficients[::-1])), maxsteps=100, extraprec=100))
    except _CONTEXT.NoConvergence:
        raise NotComputed from None


def close(first: Number, second: Number) -> bool:
    """Return whether two values are equal, as far as they were computed."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    left, right = _inexact(first), _inexact(second)
    return bool(abs(left - right) <= max(abs(left), abs(right)) * _agreement)


def rounds_to(value: Number, rounded: Any) -> bool:
    """Return whether a decimal (a formula "num") is `value` rounded to its last digit, and has 6 decimals and 6 digits at least."""
    if rounded[0] == "neg":
        value, rounded = -value, rounded[1]
    if rounded[0] != "num" or rounded[2] < MIN_DECIMALS or rounded[3] < MIN_SIGNIFICANT or _inexact(value).imag != 0:
        return False
    return bool(round(as_fraction(value), rounded[2]) == rounded[1])


def _inexact(value: Number) -> Any:
    return _CONTEXT.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _pairwise(operation: Callable[[Number, Number], Number], left: Number, right: Number) -> Number:
    if not (isinstance(left, Fraction) and isinstance(right, Fraction)):
        return operation(_inexact(left), _inexact(right))
    value = operation(left, right)
    bits = value.numerator.bit_length() + value.denominator.bit_length()
    if bits > MAX_BITS:
        raise NotComputed
    spend(bits // STEP_BITS)
    return value


def _without_noise(value: Number, size: Number) -> Number:
    """Return a value that is computed from numbers of a size; 0 if it is a rounding error."""
    exact = isinstance(value, Fraction)
    return value if exact or _CONTEXT.mag(value) > _CONTEXT.mag(size) + NOISE_BITS - _CONTEXT.prec else Fraction(0)


def add(left: Number, right: Number) -> Number:
    return _without_noise(_pairwise(operator.add, left, right), left)


multiply = partial(_pairwise, operator.mul)


def divide(left: Number, right: Number) -> Number:
    if right == 0:
        raise NoValue
    return _pairwise(operator.truediv, left, right)


def _power(base: Number, exponent: Number) -> Number:
    if base == 0:
        if real(exponent) <= 0:
            raise NoValue
        return Fraction(0)
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(1, base.numerator.bit_length() + base.denominator.bit_length() - 1)
        if abs(exponent) * bits > MAX_BITS and abs(base) != 1:
            raise NotComputed
        return base ** int(exponent)
    spend(FUNCTION_STEPS)
    odd = isinstance(exponent, Fraction) and exponent.denominator % 2
    if odd and not isinstance(base, _CONTEXT.mpc) and base < 0:
        return (-1) ** (exponent.numerator % 2) * _power(-base, exponent)
    base, exponent = _inexact(base), _inexact(exponent)
    if abs(_CONTEXT.log(abs(base))) * abs(exponent) > MAX_MAGNITUDE:
        raise NotComputed
    return _CONTEXT.power(base, exponent)


def _rounded(name: str, value: Number) -> Number:
    if isinstance(value, Fraction):
        return Fraction(getattr(math, name)(value))
    nearest = _CONTEXT.nint(real(value))
    return Fraction(int(getattr(_CONTEXT, name)(value) if _without_noise(value - nearest, value) else nearest))


def _logarithm(value: Number, base: Number = None) -> Number:
    if value == 0 or base in (0, 1):
        raise NoValue
    spend(FUNCTION_STEPS)
    found = _CONTEXT.log(_inexact(value))
    return found if base is None else found / _CONTEXT.log(_inexact(base))


def _analytic(function: Callable[..., Any], *values: Number) -> Number:
    spend(FUNCTION_STEPS)
    arguments = list(map(_inexact, values))
    if max(map(abs, arguments)) > 1e9:
        raise NotComputed
    try:
        found = function(*arguments)
    except (ZeroDivisionError, ValueError):
        raise NoValue from None
    if not _without_noise(_CONTEXT.one, found):  # at a pole
        raise NoValue
    return _without_noise(found, arguments[0])


def _counting(function: Callable[..., int], *values: Number) -> Number:
    """Return the value of a function of natural numbers."""
    if not all(isinstance(n, Fraction) and n.denominator == 1 and 0 <= n <= MAX_ARGUMENT for n in values):
        raise NotComputed
    return Fraction(function(*map(int, values)))


def _applied(name: str, *arguments: Number) -> Number:
    """Return a value for a function of which only the name is known: the same for equal arguments."""
    total: Number = Fraction(sum(map(ord, name)), 97)
    for place, value in enumerate(arguments, 2):
        square = multiply(Fraction(place, 7), multiply(value, value))
        total = add(total, add(square, multiply(Fraction(3, 5), value)))
    return total


def _bounded(node: Any, values: dict[str, Fraction]) -> Number:
    kind, name, low, high, body = node
    if None in (low, high) or high == INFINITY:
        return _extrapolated(node, values)
    first, last = evaluate(low, values), evaluate(high, values)
    if any(not isinstance(bound, Fraction) or bound.denominator != 1 for bound in (first, last)) or first > last:
        raise NotComputed
    operation = add if kind == "sum" else multiply
    total: Number = Fraction(kind == "prod")
    for index in range(int(first), int(last) + 1):
        total = operation(total, evaluate(body, {**values, name: Fraction(index)}))
    return total


@_CONTEXT.workdps(LIMIT_DIGITS)  # type: ignore[untyped-decorator]
def _extrapolated(node: Any, values: dict[str, Fraction]) -> Number:
    """Return the value of a limit, an integral or an infinite sum. It has less digits than others."""
    global _agreement
    _agreement, kind = LIMIT_AGREEMENT, node[0]
    body, name = node[1:3] if kind in ("int", "lim") else (node[4], node[1])
    terms = count()

    def at(place: Any) -> Any:
        spend(FUNCTION_STEPS if kind == "int" else TERM_STEPS)
        if kind != "int" and next(terms) > MAX_TERMS:
            raise NotComputed
        try:
            return real(evaluate(body, {**values, name: _CONTEXT.mpf(place)}))
        except NotComputed:
            if kind == "int" and abs(place) > TAIL:  # such as e^-x; where it grows, the error of the integral shows it
                return _CONTEXT.zero
            raise

    def bound(formula: Any) -> Any:
        infinite = formula in (INFINITY, ("neg", INFINITY))
        return _CONTEXT.mpf("inf" if formula == INFINITY else "-inf") if infinite else real(evaluate(formula, values))

    if None in node:
        raise NotComputed
    if kind == "lim":
        return _CONTEXT.limit(at, bound(node[3]))
    if kind == "int":
        found, error = _CONTEXT.quad(at, list(map(bound, node[3:])), error=True)
        if error > _ACCURACY * max(1, abs(found)):
            raise NotComputed
        return found
    if kind == "prod" or abs(at(1000)) > abs(at(100)) / 2:  # extrapolation gives a value to divergent sums too
        raise NotComputed
    return _CONTEXT.nsum(at, list(map(bound, node[2:4])))


_CONSTANTS = {"pi": +_CONTEXT.pi, "e": +_CONTEXT.e, "i": _CONTEXT.mpc(0, 1)}
_OPERATIONS: dict[str, Callable[..., Number]] = {
    "+": add, "*": multiply, "/": divide, "^": _power, "neg": operator.neg,
    "deg": lambda value: _inexact(value) * _CONTEXT.pi / 180,
}  # fmt: skip
_ANALYTIC = "sin cos tan cot sec csc asin acos atan sinh cosh tanh coth arg"
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    **{name: partial(_analytic, getattr(_CONTEXT, name)) for name in _ANALYTIC.split()},
    "root": lambda value, degree: _power(value, divide(Fraction(1), degree)),
    "abs": abs, "floor": partial(_rounded, "floor"), "ceil": partial(_rounded, "ceil"),
    "gcd": partial(_counting, math.gcd), "lcm": partial(_counting, math.lcm),
    "max": lambda *values: max(values, key=real), "min": lambda *values: min(values, key=real),
    "log": _logarithm, "ln": _logarithm, "exp": partial(_power, _CONSTANTS["e"]),
    "factorial": partial(_counting, math.factorial), "factorial2": partial(_counting, lambda n: math.prod(range(n, 0, -2))),
    "binom": partial(_counting, math.comb), "perm": partial(_counting, math.perm),
}  # fmt: skip


# --- points

_COUNTS, _STEPS, _PIECES, _REAL_NAMES = (
    TABLES["names"][name].split() for name in ("counts", "steps", "pieces", "reals")
)


def points(names: frozenset[str], formula: Any = None) -> Iterator[dict[str, Fraction]]:
    """Yield values of the names of a formula. A piecewise formula, such as `|x-3|`, gets more: on both sides of each number in it."""
    far = any(map(_is_piecewise, nodes(formula))) and not has(formula, "sum", "prod")
    whole = sorted({int(node[1]) for node in nodes(formula) if node[0] == "num"}) if far else ()
    chosen = {}
    for place, name in enumerate(sorted(names)):
        integer = has(formula, *_COUNTS) or (has(formula, *_STEPS) and name not in _REAL_NAMES)
        near, large, step = (INTEGERS, FAR_INTEGERS, 1) if integer else (POINTS, FAR, Fraction(1, 3))
        beside = [sign * n + shift * step for n in whole for shift in (-1, 0, 1) for sign in (1, -1)]
        offset = place * (2 if integer else Fraction(1, 97))
        chosen[name] = [value + offset for value in ((*near, *large, *beside) if far else near)]
    for shift in range(max(map(len, chosen.values()), default=1)):
        yield {name: row[(place + shift * (1 + place)) % len(row)] for place, (name, row) in enumerate(chosen.items())}


def _is_piecewise(node: Formula) -> bool:
    """Return whether a function can have pieces, or no real value in a part of the plane."""
    power = node[0] == "^" and has(node[2], "/", "sym") and symbols(node[1])
    return bool(power or (node[0] == "call" and node[1] in _PIECES and symbols(node)))


def _values(one: Any, two: Any) -> Iterator[tuple[Number, Number]]:
    """Yield the values of two formulas with names at points where both have a value."""
    for values in points(symbols(one, two), ("+", one, two)):
        try:
            yield evaluate(one, values), evaluate(two, values)
        except (NoValue, NotComputed):
            spend(0)  # raises NotComputed if no steps are left


# --- comparison

_OF_MATRICES = (("neg", number(1)), ("sym", "T"))  # exponents


def rational(value: Any) -> Fraction | None:
    """Return the value of a formula that is a rational number, else None."""
    if not isinstance(value, tuple) or symbols(value):
        return None
    try:
        found = evaluate(value, {})
    except (NotComputed, NoValue):
        return None
    return found if isinstance(found, Fraction) else None


def same_formulas(one: Any, two: Any) -> bool:
    """Return whether two formulas without plus-minus signs and matrices are equal; False also if that is not computed."""
    one, two = _same_names(one, two)
    infinite = [has(value, "inf") and not has(value, "sum", "prod", "int", "lim") for value in (one, two)]
    if any(infinite):
        return all(infinite) and one == two
    if _of_matrices(one, two):
        return operands(one, "*") == operands(two, "*")
    if _same_values(one, two):
        return True
    return (has(one, "log") or has(two, "log")) and _same_values(decadic(one), decadic(two))


def _of_matrices(*products: Any) -> bool:
    """Return whether formulas are products of capital letters one of which is inverted or transposed, as in `A^{-1}B`."""
    if any(has(value, "+", "/") for value in products) or len(names := symbols(*products)) < 2:
        return False
    factors = [factor for value in products for factor in operands(value, "*")]
    return all(map(str.isupper, names)) and any(factor[0] == "^" and factor[2] in _OF_MATRICES for factor in factors)


def constant_ratio(one: Any, two: Any) -> Number | None:
    """Return one / two if that is the same number at all points, else None."""
    ratios = [divide(above, below) for above, below in _values(one, two) if above != 0 != below]
    return ratios[0] if len(ratios) > MIN_AGREED and all(close(ratio, ratios[0]) for ratio in ratios) else None


def _same_names(one: Any, two: Any) -> tuple[Any, Any]:
    """Return both formulas with the same symbols for the imaginary unit and the constant of integration."""
    alone = symbols(one) ^ symbols(two)
    for name in sorted(alone):  # constants `c_1` and `C_1`
        if re.fullmatch(r"c_\d+", name) and name.upper() in alone:
            one, two = (replaced(value, ("sym", name.upper()), ("sym", name)) for value in (one, two))
    if "I" in alone and has(one, "i") != has(two, "i") and has(one, "i") == ("I" in symbols(two)):
        old, new = ("sym", "I"), ("const", "i")
    elif alone == {"C", "c"} and all(
        {("sym", "C"), ("sym", "c")}.intersection(operands(value, "+")) for value in (one, two)
    ):
        old, new = ("sym", "C"), ("sym", "c")
    else:
        return one, two
    return replaced(one, old, new), replaced(two, old, new)


def _same_values(one: Any, two: Any) -> bool:
    try:
        return _same_at_points(one, two) if symbols(one, two) else _same_numbers(one, two)
    except (NoValue, NotComputed):
        return False


def _same_numbers(one: Any, two: Any) -> bool:
    left, right = evaluate(one, {}), evaluate(two, {})
    return close(left, right) or rounds_to(right, one) or rounds_to(left, two)


def _same_at_points(one: Any, two: Any) -> bool:
    """Return whether values agree at all points where both are real, and these are enough."""
    complex_numbers = has(one, "i") or has(two, "i")
    agreed = 0
    for left, right in _values(one, two):
        if not complex_numbers:
            imaginary = [bool(getattr(value, "imag", 0)) for value in (left, right)]
            if imaginary == [True, True]:
                continue
            if any(imaginary):
                return False
        if not close(left, right):
            return False
        agreed += 1
    return agreed >= MIN_AGREED
