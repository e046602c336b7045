"""Compare formulas: by their exact values, by 50 digits, or by their values at several points."""

from fractions import Fraction
from typing import Any

from rstar_lab.verify.numeric import NeedsAlgebra, NoValue, Number, close, evaluate, points, real, rounds_to
from rstar_lab.verify.values import decadic, has, replaced, symbols

MIN_AGREED = 3  # points at which formulas have the same value
_STEPS = ("floor", "ceil", "mod", "gcd", "lcm", "binom", "factorial", "perm", "factorial2")


def rational(value: Any) -> Fraction | None:
    """Return the value of a formula that is a rational number, else None."""
    if not isinstance(value, tuple) or symbols(value):
        return None
    try:
        found = evaluate(value, {})
    except (NeedsAlgebra, NoValue):
        return None
    return found if isinstance(found, Fraction) else None


def same_formulas(one: Any, two: Any, algebra: Any) -> bool:
    """Return whether two formulas without plus-minus signs and matrices are equal. algebra: see `equality.equal`."""
    one, two = _same_names(one, two)
    infinite = [has(value, "inf") and not has(value, "sum", "prod", "int", "lim") for value in (one, two)]
    if any(infinite):
        return all(infinite) and one == two
    if _same_values(one, two, algebra):
        return True
    return (has(one, "log") or has(two, "log")) and _same_values(decadic(one), decadic(two), algebra)


def constant_ratio(one: Any, two: Any) -> Number | None:
    """Return one / two if that is the same number at all points, else None."""
    ratios = []
    for values in points(symbols(one, two), False):
        try:
            above, below = (evaluate(value, values) for value in (one, two))
        except NoValue:
            continue
        if below == 0 or above == 0:
            continue
        if not (isinstance(above, Fraction) and isinstance(below, Fraction)):
            above, below = real(above), real(below)
        ratios.append(above / below)
    return ratios[0] if len(ratios) > MIN_AGREED and all(close(ratio, ratios[0]) for ratio in ratios) else None


def _same_names(one: Any, two: Any) -> tuple[Any, Any]:
    """Return both formulas with one spelling of the imaginary unit and of a constant of integration."""
    ours, theirs = symbols(one) - symbols(two), symbols(two) - symbols(one)
    for mine, other in ((one, two), (two, one)):
        if ("sym", "I") in _parts(mine) and "I" in ours | theirs and has(other, "i") and not has(mine, "i"):
            changed = replaced(mine, ("sym", "I"), ("const", "i"))
        elif {tuple(ours), tuple(theirs)} == {("C",), ("c",)} and ("sym", "C") in _terms(mine):
            changed = replaced(mine, ("sym", "C"), ("sym", "c")) if ("sym", "c") in _terms(other) else mine
        else:
            continue
        return (changed, two) if mine is one else (one, changed)
    return one, two


def _parts(node: Any) -> list[Any]:
    return [node, *(inner for part in node[1:] for inner in _parts(part))] if isinstance(node, tuple) else []


def _terms(node: Any) -> list[Any]:
    return [*_terms(node[1]), *_terms(node[2])] if node[0] == "+" else [node]


def _same_values(one: Any, two: Any, algebra: Any) -> bool:
    try:
        names = symbols(one, two)
        found = _same_at_points(one, two, names) if names else _same_numbers(one, two)
    except NoValue:
        return False
    except NeedsAlgebra:
        found = None
    if found is not None:
        return found
    if algebra is None:
        raise NeedsAlgebra
    return bool(algebra.formulas_equal(one, two))


def _same_numbers(one: Any, two: Any) -> bool:
    left, right = evaluate(one, {}), evaluate(two, {})
    if close(left, right):
        return True
    if one[0] == two[0] == "num" and one[2] and two[2]:
        shorter, longer = sorted((one, two), key=lambda value: value[2])
        return bool(shorter[2] < longer[2]) and rounds_to(longer[1], shorter)
    return _is_rounded(one, right) or _is_rounded(two, left)


def _is_rounded(decimal: Any, value: Number) -> bool:
    if decimal[0] == "neg":
        decimal, value = decimal[1], -value
    try:
        return rounds_to(value, decimal)
    except NoValue:
        return False


def _same_at_points(one: Any, two: Any, names: frozenset[str]) -> bool | None:
    """Return whether values agree at all points where both are real; None if there are too few."""
    steps = has(one, *_STEPS) or has(two, *_STEPS)
    complex_numbers = has(one, "i") or has(two, "i")
    agreed = 0
    for values in points(names, steps):
        try:
            left, right = evaluate(one, values), evaluate(two, values)
        except NoValue:
            continue
        if not complex_numbers:
            imaginary = [bool(getattr(value, "imag", 0)) for value in (left, right)]
            if imaginary == [True, True]:
                continue
            if any(imaginary):
                return False
        if not close(left, right):
            return False
        agreed += 1
    return True if agreed >= MIN_AGREED else None
