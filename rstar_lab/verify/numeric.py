"""Values of formulas: exact fractions where arithmetic is exact, else 50 digits. No text is evaluated, and no value is large.

Two formulas with letters are equal if their values agree at several points.
"""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import mpmath

MAX_BITS = 40_000  # of an exact number
MAX_MAGNITUDE = 1e6  # of the logarithm of a number that is not exact
MIN_DECIMALS = MIN_SIGNIFICANT = 6
MAX_TERMS = 300  # of a sum
DIGITS = 50
_CONTEXT = mpmath.mp.clone()
_CONTEXT.dps = DIGITS
AGREEMENT = _CONTEXT.mpf(10) ** -35
# Rational points of both signs with odd denominators, so that an odd root of a negative number is real; integers for formulas
# with steps.
POINTS = tuple(Fraction(p, q) for p, q in ((7, 5), (3, 23), (-11, 7), (29, 17), (-5, 13), (8, 19), (17, 61), (-37, 31)))
STEPS = tuple(Fraction(n) for n in (7, 13, 29, 18, 58, 101, 3, 46))

Number = Any  # Fraction, mpf or mpc


class NeedsAlgebra(Exception):
    """A formula has no value here: sympy has to decide."""


class NoValue(Exception):
    """A formula has no value at a point, such as 1/0."""


def has(node: Any, *operations: str) -> bool:
    """Return whether a formula has one of the operations or names of functions in it."""
    if not isinstance(node, tuple):
        return False
    if node[0] in operations or (node[0] in ("call", "const") and node[1] in operations):
        return True
    return any(has(part, *operations) for part in node[1:])


def symbols(node: Any) -> frozenset[str]:
    """Return the names in a formula."""
    if not isinstance(node, tuple):
        return frozenset()
    if node[0] == "sym":
        return frozenset((node[1],))
    bound = {"sum": 1, "prod": 1, "int": 2, "lim": 2}.get(node[0])
    found = frozenset().union(*(symbols(part) for part in node[1:]))
    found |= {node[1]} if node[0] == "call" and node[1].startswith("apply ") else frozenset()
    return found - ({node[bound]} if bound else frozenset())


def real(value: Number) -> Any:
    """Return a value as mpf, or raise NoValue if it is complex."""
    if isinstance(value, Fraction):
        return _CONTEXT.mpf(value.numerator) / value.denominator
    if isinstance(value, _CONTEXT.mpc):
        if value.imag != 0:
            raise NoValue
        return value.real
    return value


def _inexact(value: Number) -> Any:
    return real(value) if isinstance(value, Fraction) else value


def evaluate(node: Any, values: dict[str, Fraction], decadic: bool = False) -> Number:
    """Return the value of a formula.

    Args:
        node: The formula.
        values: Values of its names.
        decadic: Whether `log` without a base has base 10, not e.

    Raises:
        NeedsAlgebra: For limits, integrals, infinite sums and large numbers.
        NoValue: If it has no value.
    """
    if not isinstance(node, tuple):
        raise NeedsAlgebra
    kind = node[0]
    if kind == "num":
        return node[1]
    if kind == "sym":
        if node[1] not in values:
            raise NeedsAlgebra
        return values[node[1]]
    if kind == "const":
        if node[1] == "inf":
            raise NoValue
        return {"pi": +_CONTEXT.pi, "e": +_CONTEXT.e, "i": _CONTEXT.mpc(0, 1)}[node[1]]
    if kind in ("sum", "prod"):
        return _bounded(node, values, decadic)
    if kind in ("int", "lim", "pm", "mp"):
        raise NeedsAlgebra
    if kind == "call":
        return _call(node[1], [evaluate(part, values, decadic) for part in node[2:]], decadic)
    left = evaluate(node[1], values, decadic)
    if kind == "neg":
        return -left
    if kind == "deg":
        return _inexact(left) * _CONTEXT.pi / 180
    return _operate(kind, left, evaluate(node[2], values, decadic))


def _operate(kind: str, left: Number, right: Number) -> Number:
    if kind == "^":
        return _power(left, right)
    if not (isinstance(left, Fraction) and isinstance(right, Fraction)):
        left, right = _inexact(left), _inexact(right)
    if kind == "+":
        return left + right
    if kind == "*":
        return _bounded_size(left * right)
    if right == 0:
        raise NoValue
    return left / right


def _bounded_size(value: Number) -> Number:
    if isinstance(value, Fraction) and value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise NeedsAlgebra
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            if base == 0 and exponent <= 0:
                raise NoValue
            bits = max(1, base.numerator.bit_length() + base.denominator.bit_length() - 1)
            if abs(exponent) * bits > MAX_BITS and abs(base) != 1:
                raise NeedsAlgebra
            return base ** int(exponent)
        if base < 0 and exponent.denominator % 2:
            return (-1) ** (exponent.numerator % 2) * _power(-base, exponent)
        if base >= 0 and exponent.denominator < 50 and (root := _exact_root(base, exponent.denominator)) is not None:
            return _power(root, Fraction(exponent.numerator))
    if base == 0:
        if real(exponent) <= 0:
            raise NoValue
        return Fraction(0)
    size = abs(_CONTEXT.log(abs(_inexact(base)))) * abs(_inexact(exponent))
    if size > MAX_MAGNITUDE:
        raise NeedsAlgebra
    return _CONTEXT.power(_inexact(base), _inexact(exponent))


def _exact_root(base: Fraction, degree: int) -> Fraction | None:
    parts = []
    for part in (base.numerator, base.denominator):
        if part.bit_length() > 2_000:
            return None
        root = math.isqrt(part) if degree == 2 else round(part ** (1 / degree)) if part < 2**900 else 0
        if root**degree != part:
            return None
        parts.append(root)
    return Fraction(parts[0], parts[1])


def _bounded(node: Any, values: dict[str, Fraction], decadic: bool) -> Number:
    kind, name, low, high, body = node
    if low is None or high is None or (isinstance(high, tuple) and has(high, "inf")):
        raise NeedsAlgebra
    first, last = evaluate(low, values), evaluate(high, values)
    if any(not isinstance(bound, Fraction) or bound.denominator != 1 for bound in (first, last)):
        raise NeedsAlgebra
    if last - first > (15 if has(body, "sum", "prod") else MAX_TERMS) or last < first:
        raise NeedsAlgebra
    total: Number = Fraction(kind == "prod")
    for index in range(int(first), int(last) + 1):
        term = evaluate(body, {**values, name: Fraction(index)}, decadic)
        total = _operate("+" if kind == "sum" else "*", total, term)
    return total


_MP_FUNCTIONS = {
    name: getattr(_CONTEXT, name)
    for name in ["sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "coth", "arg"]
}  # fmt: skip


_GAMMA_FUNCTIONS = {
    "factorial": _CONTEXT.factorial, "factorial2": _CONTEXT.fac2, "binom": _CONTEXT.binomial, "perm": _CONTEXT.ff,
}  # fmt: skip


def _call(name: str, arguments: list[Number], decadic: bool) -> Number:
    first = arguments[0]
    if name == "root":
        degree = arguments[1]
        if not isinstance(degree, Fraction) or degree == 0:
            return _power(first, _operate("/", Fraction(1), degree))
        if degree == 2 and not isinstance(first, Fraction):
            return _CONTEXT.sqrt(first)
        odd = degree.denominator == 1 and degree.numerator % 2
        if odd and not isinstance(first, Fraction | _CONTEXT.mpc) and first < 0:
            return -_power(-first, 1 / degree)
        return _power(first, 1 / degree)
    if name == "abs":
        return abs(first)
    if name in ("floor", "ceil"):
        module, value = (math, first) if isinstance(first, Fraction) else (_CONTEXT, real(first))
        return Fraction(int(getattr(module, name)(value)))
    if name in ("factorial", "factorial2", "binom", "perm"):
        return _combinatorial(name, arguments)
    if name in ("gcd", "lcm"):
        if not all(isinstance(value, Fraction) and value.denominator == 1 for value in arguments):
            raise NeedsAlgebra
        return Fraction(getattr(math, name)(*(int(value) for value in arguments)))
    if name in ("max", "min"):
        return {"max": max, "min": min}[name](arguments, key=real)
    if name == "mod":
        if not all(isinstance(value, Fraction) for value in arguments) or arguments[1] == 0:
            raise NeedsAlgebra
        return first % arguments[1]
    if name in ("log", "ln"):
        if first == 0:
            raise NoValue
        value = _CONTEXT.log(_inexact(first))
        base = arguments[1] if len(arguments) > 1 else Fraction(10) if name == "log" and decadic else None
        if base is None:
            return value
        if base == 0 or base == 1:
            raise NoValue
        return value / _CONTEXT.log(_inexact(base))
    if name in _MP_FUNCTIONS:
        argument = _inexact(first)
        if abs(argument) > 1e9:
            raise NeedsAlgebra
        try:
            value = _MP_FUNCTIONS[name](argument)
        except (ZeroDivisionError, ValueError):
            raise NoValue from None
        if abs(value) > 1e40:
            raise NoValue
        return _CONTEXT.mpf(0) if abs(value) < 1e-45 else value
    if name.startswith("apply "):
        return _applied(name, arguments)
    raise NeedsAlgebra


def _applied(name: str, arguments: list[Number]) -> Number:
    """Return a value for a function of which only the name is known: the same for equal arguments."""
    total = Fraction(sum(map(ord, name)), 97)
    for place, value in enumerate(arguments, 2):
        total = _operate("+", total, _operate("*", Fraction(place, 7), _operate("*", value, value)))
        total = _operate("+", total, _operate("*", Fraction(3, 5), value))
    return total


def _combinatorial(name: str, arguments: list[Number]) -> Number:
    if any(not isinstance(value, Fraction) or abs(value) > 2_000 for value in arguments):
        raise NeedsAlgebra
    if all(value.denominator == 1 and value >= 0 for value in arguments):
        n = int(arguments[0])
        if name == "factorial":
            return Fraction(math.factorial(n))
        if name == "factorial2":
            return Fraction(math.prod(range(n, 0, -2)))
        return Fraction((math.comb if name == "binom" else math.perm)(n, int(arguments[1])))
    reals = [real(value) for value in arguments]
    try:
        return _GAMMA_FUNCTIONS[name](*reals)
    except (ValueError, ZeroDivisionError):
        raise NoValue from None


def close(first: Number, second: Number) -> bool:
    """Return whether two values are equal, as far as they were computed."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    left, right = _inexact(first), _inexact(second)
    return bool(abs(left - right) <= max(abs(left), abs(right)) * AGREEMENT)


def rounds_to(value: Number, rounded: Any) -> bool:
    """Return whether a decimal (a formula "num") is `value` rounded to its last digit, and has 6 decimals and 6 digits at least."""
    decimal = isinstance(rounded, tuple) and rounded[0] == "num"
    if not decimal or rounded[2] < MIN_DECIMALS or rounded[3] < MIN_SIGNIFICANT:
        return False
    exact = value if isinstance(value, Fraction) else None
    if exact is None:
        number = real(value)
        exact = Fraction(int(_CONTEXT.nint(number * 10 ** (rounded[2] + 12)))) / 10 ** (rounded[2] + 12)
    return bool(round(exact, rounded[2]) == rounded[1])


def points(names: frozenset[str], steps: bool) -> Iterator[dict[str, Fraction]]:
    """Yield values of names, several times."""
    ordered = sorted(names)
    chosen, offset = (STEPS, Fraction(2)) if steps else (POINTS, Fraction(1, 97))
    for shift in range(len(chosen)):
        yield {
            name: chosen[(place + shift * (1 + place)) % len(chosen)] + place * offset
            for place, name in enumerate(ordered)
        }
