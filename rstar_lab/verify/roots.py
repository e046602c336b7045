"""Where a formula with one name is zero or has no value: of polynomials, quotients, absolute values and square roots."""

from collections.abc import Mapping
from fractions import Fraction
from functools import reduce
from itertools import zip_longest

from rstar_lab.verify.numeric import (
    FUNCTION_STEPS,
    MIN_AGREED,
    NotComputed,
    NoValue,
    Number,
    add,
    as_fraction,
    close,
    divide,
    evaluate,
    multiply,
    points,
    polynomial_roots,
    spend,
)
from rstar_lab.verify.values import Formula, difference, nodes, number, replaced, symbols

MAX_DEGREE = 12
MAX_DENOMINATOR = 10**9  # of a rational root

Polynomial = list[Number]  # its coefficients, the constant first
Quotient = tuple[Polynomial, Polynomial]
_ZERO, _ONE = Fraction(0), Fraction(1)


def boundary(left: Formula, right: Formula, name: str) -> list[Formula]:
    """Return all numbers at which the order of two formulas with one name can change, and others.

    Raises NotComputed for formulas with other functions than absolute values, and with square roots in a sum.
    """
    for one, two in ((left, right), (right, left)):
        if one == ("sym", name) and not symbols(two):
            return [two]
        if one[:2] == ("call", "root") and one[3] == number(2):
            return boundary(one[2], ("^", two, number(2)), name) + boundary(one[2], number(0), name)
    formula = difference(left, right)
    if absolute := next((node for node in nodes(formula) if node[:2] == ("call", "abs")), None):
        signed = (replaced(formula, absolute, sign) for sign in (absolute[2], ("neg", absolute[2])))
        return [point for branch in signed for point in boundary(branch, number(0), name)]
    found = [root for side in _quotient(formula, name, {}) for root in _roots(side)]
    return [number(root) if isinstance(root, Fraction) else ("value", root) for root in found if not root.imag]


def same_solutions(one: Formula, two: Formula) -> bool:
    """Return whether two formulas with the same names are zero at the same values of a name, whatever the others are."""
    names = symbols(one)
    found = {_same_solutions(one, two, name, names - {name}) for name in sorted(names)}
    return True in found and False not in found


def _same_solutions(one: Formula, two: Formula, name: str, others: frozenset[str]) -> bool | None:
    """Return whether the values of one name are the same; None if they are not computed."""
    compared, needed = 0, MIN_AGREED if others else 1
    for values in points(others):
        try:
            ours, theirs = _solutions(one, name, values), _solutions(two, name, values)
        except NoValue:
            continue
        except NotComputed:
            return None
        if len(ours) != len(theirs) or not all(any(close(a, b) for b in theirs) for a in ours):
            return False
        compared += bool(ours)
    return True if compared >= needed else None


def _solutions(formula: Formula, name: str, values: Mapping[str, Fraction]) -> list[Number]:
    above, below = _quotient(formula, name, values)
    return [root for root in _roots(above) if not any(close(root, pole) for pole in _roots(below))]


def _quotient(node: Formula, name: str, values: Mapping[str, Fraction]) -> Quotient:
    """Return a formula as a quotient of polynomials of a name."""
    spend(FUNCTION_STEPS)
    if name not in symbols(node):
        return [evaluate(node, dict(values))], [_ONE]
    if node == ("sym", name):
        return [_ZERO, _ONE], [_ONE]
    if node[0] == "neg":
        node = ("*", number(-1), node[1])
    if node[0] == "^":
        exponent = evaluate(node[2], dict(values))
        if not isinstance(exponent, Fraction) or exponent.denominator > 1 or not 0 < abs(exponent) <= MAX_DEGREE:
            raise NotComputed
        base = _quotient(node[1], name, values)
        above, below = (reduce(_product, [part] * abs(int(exponent))) for part in base)
        return (above, below) if exponent > 0 else (below, above)
    if node[0] not in ("+", "*", "/"):
        raise NotComputed
    (a, b), (c, d) = (_quotient(part, name, values) for part in node[1:])
    if node[0] == "*":
        return _product(a, c), _product(b, d)
    if node[0] == "/":
        return _product(a, d), _product(b, c)
    return [add(*pair) for pair in zip_longest(_product(a, d), _product(c, b), fillvalue=_ZERO)], _product(b, d)


def _product(one: Polynomial, two: Polynomial) -> Polynomial:
    if len(one) + len(two) > MAX_DEGREE + 2:
        raise NotComputed
    found = [_ZERO] * (len(one) + len(two) - 1)
    for place, coefficient in enumerate(one):
        for other, factor in enumerate(two):
            found[place + other] = add(found[place + other], multiply(coefficient, factor))
    return found


def _divided(one: Polynomial, two: Polynomial) -> tuple[Polynomial, Polynomial]:
    """Return the quotient and the remainder of exact polynomials."""
    quotient: Polynomial = []
    rest = list(one)
    while len(rest) >= len(two):
        quotient.insert(0, rest[-1] / two[-1])
        shift = len(rest) - len(two)
        rest = [value - quotient[0] * two[n - shift] if n >= shift else value for n, value in enumerate(rest)][:-1]
    return quotient, _trimmed(rest)


def _trimmed(polynomial: Polynomial) -> Polynomial:
    while polynomial and polynomial[-1] == 0:
        polynomial = polynomial[:-1]
    return polynomial


def _roots(polynomial: Polynomial) -> list[Number]:
    """Return the different roots of a polynomial; exact ones as fractions."""
    polynomial = _trimmed(polynomial)
    exact = all(isinstance(value, Fraction) for value in polynomial)
    if exact:
        common, rest = polynomial, _trimmed([n * value for n, value in enumerate(polynomial)][1:])
        while rest:
            common, rest = rest, _divided(common, rest)[1]
        polynomial = _divided(polynomial, common)[0] if len(common) > 1 else polynomial
    if len(polynomial) < 3:
        return [divide(multiply(Fraction(-1), polynomial[0]), polynomial[1])] if len(polynomial) == 2 else []
    return [_exact(root, polynomial) if exact else root for root in polynomial_roots(polynomial)]


def _exact(root: Number, polynomial: Polynomial) -> Number:
    """Return a root as a fraction, if it is one."""
    if root.imag:
        return root
    found = as_fraction(root).limit_denominator(MAX_DENOMINATOR)
    return found if sum(value * found**n for n, value in enumerate(polynomial)) == 0 else root
