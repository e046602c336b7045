"""The types of answers that `syntax` reads and `equality` compares.

A formula is a nested tuple: ("num", Fraction, decimals, significant digits), ("sym", name), ("const", "pi" | "e" | "i" | "inf"),
("+" | "*" | "/" | "^" | "pm" | "mp", left, right), ("neg" | "deg", formula), ("call", function, arguments...),
("sum" | "prod", name, from, to, body), ("int", body, name, from, to), ("lim", body, name, point), ("value", computed number).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial, reduce
from typing import Any

from rstar_lab.verify.tokens import Unreadable
from rstar_lab.verify.units import Unit

Formula = tuple[Any, ...]

DIGIT_GROUP = re.compile(r"\d{3}(?:\.\d+)?")
MAX_EXPONENT, MAX_DIGITS, MAX_DETERMINANT = 4_000, 2_000, 5
_PARTS = tuple | str | int | Fraction | None
_BARRED = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{?(\d+)\}?|\((\d+)\))")
_PERIOD = re.compile(r"(\d*)\.(\d*?)(?:(\d{1,6}?)\3{2,}|(\d{2,6})\4)")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A formula with what stands beside it. noun: words after it that are no unit. counted: all of them are in `COUNTED`."""

    formula: Any
    unit: Unit | None = None
    noun: str = ""
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Group:
    """Items in brackets, `{` for a set, or without brackets (``""``), joined by ``,``, ``and`` or ``or``.

    text: for items without brackets, how they are written, if they can be one number (`1,5`; `100,200`).
    """

    opening: str
    items: tuple[Any, ...]
    closing: str
    joined: str = ","
    text: str = ""


@dataclass(frozen=True, slots=True)
class Combined:
    """Sets joined by an operation: cup, cap or setminus."""

    operation: str
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """Sides with the relations between them: = < > <= >= != approx equiv in notin, or another command."""

    sides: tuple[Any, ...]
    signs: tuple[str, ...]
    names: tuple[str, ...]  # of the sides: the name that a side is, or ""


@dataclass(frozen=True, slots=True)
class Builder:
    """A set in set-builder notation."""

    element: Any
    conditions: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of formulas."""

    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Cases:
    """A function in cases: rows of value and condition."""

    rows: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class Tagged:
    """Numbers with a meaning of their own. kind: ratio, time, date, remainder, base (digits, base), mod (residue, modulus)."""

    kind: str
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A letter of a multiple-choice question, and the value behind it, if it is given."""

    letter: str
    value: Any = None


@dataclass(frozen=True, slots=True)
class Text:
    """Words, in lower case."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nothing:
    """No solution, or the empty set."""


def number(value: int | Fraction, decimals: int = 0, significant: int = 0) -> Formula:
    """Return the formula of a number."""
    return ("num", Fraction(value), decimals, significant)


def product(letters: str) -> Formula:
    """Return the product of letters."""
    names = [("const" if letter in "ei" else "sym", letter) for letter in letters]
    return reduce(lambda left, right: ("*", left, right), names)


def operands(node: Any, sign: str) -> list[Any]:
    """Return the factors of a product (sign `*`) or the terms of a sum (`+`), however they are nested."""
    inside = isinstance(node, tuple) and node[0] == sign
    return [operand for side in node[1:] for operand in operands(side, sign)] if inside else [node]


def nodes(value: Any) -> Iterator[Formula]:
    """Yield a formula and the formulas in it. Other values have none."""
    left = [value]
    while left:
        if isinstance(node := left.pop(), tuple):
            yield node
            left += node[1:]


def has(value: Any, *operations: str) -> bool:
    """Return whether a formula has one of the operations or names of functions in it."""
    return any(n[0] in operations or (n[0] in ("call", "const") and n[1] in operations) for n in nodes(value))


def symbols(*nodes: Any) -> frozenset[str]:
    """Return the names in formulas."""
    found: frozenset[str] = frozenset()
    for node in nodes:
        if not isinstance(node, tuple):
            continue
        if node[0] == "sym":
            found |= {node[1]}
            continue
        names = symbols(*node[1:])
        if node[0] == "call" and node[1].startswith("apply "):
            names |= {node[1]}
        if (bound := {"sum": 1, "prod": 1, "int": 2, "lim": 2}.get(node[0])) is not None:
            names -= {node[bound]}
        found |= names
    return found


def difference(left: Any, right: Any) -> Formula:
    """Return the difference of two formulas."""
    return ("+", left, ("neg", right))


def mapped(node: Any, change: Callable[[Formula], Formula]) -> Any:
    """Return a formula whose parts, and then itself, are changed by a function."""
    return change((node[0], *(mapped(part, change) for part in node[1:]))) if isinstance(node, tuple) else node


def replaced(value: Any, old: Formula, new: Formula) -> Any:
    """Return a formula, a relation or a set in which one formula takes the place of another."""
    if isinstance(value, Relation):
        return replace(value, sides=tuple(replaced(side, old, new) for side in value.sides))
    if isinstance(value, Builder):
        element, *conditions = (replaced(part, old, new) for part in (value.element, *value.conditions))
        return Builder(element, tuple(conditions))
    return mapped(value, lambda node: new if node == old else node)


def plus_minus(value: Any) -> list[Any]:
    """Return the two formulas that a plus-minus sign stands for; without the sign, the formula itself."""
    if isinstance(value, Relation) and value.signs == ("=",):
        return [replace(value, sides=(value.sides[0], side)) for side in plus_minus(value.sides[1])]
    if isinstance(value, Quantity):
        return [replace(value, formula=item) for item in plus_minus(value.formula)]
    if not has(value, "pm", "mp"):
        return [value]

    def signed(node: Formula, upper: str) -> Formula:
        if node[0] not in ("pm", "mp"):
            return node
        return ("+", *node[1:]) if node[0] == upper else difference(*node[1:])

    return [mapped(value, partial(signed, upper=upper)) for upper in ("pm", "mp")]


def checked(value: Any) -> Any:
    """Return a formula in which a number in front of a matrix is multiplied into it. Other values are returned unchanged.

    Raises Unreadable for a formula of values that have no arithmetic, such as sets and words.
    """
    if not isinstance(value, tuple):
        return value
    sign, *parts = ("*", value[1], number(-1)) if value[0] == "neg" else value
    kinds = _PARTS | Matrix if sign in ("+", "*", "/", "^") else _PARTS
    if not all(isinstance(part, kinds) for part in parts):
        raise Unreadable("a formula of sets")
    if sign == "*" and isinstance(parts[1], Matrix):
        parts.reverse()
    if sign not in ("*", "/") or not isinstance(parts[0], Matrix) or not isinstance(parts[1], tuple):
        return value
    return Matrix(tuple(tuple(checked((sign, cell, parts[1])) for cell in row) for row in parts[0].rows))


def determinant(matrix: Matrix) -> Formula:
    """Return the formula of a determinant, if it is square and small."""
    first, *others = matrix.rows
    if not len(first) == len(matrix.rows) <= MAX_DETERMINANT:
        return ("call", "det", matrix)  # has no value here
    total = number(0) if others else first[0]
    for place, cell in enumerate(first if others else ()):
        minor = Matrix(tuple(row[:place] + row[place + 1 :] for row in others))
        term = ("*", cell, determinant(minor))
        total = difference(total, term) if place % 2 else ("+", total, term)
    return total


def proper(node: Any) -> Fraction | None:
    """Return the value of a proper fraction of positive integers, else None."""
    if not isinstance(node, tuple) or node[0] != "/" or not node[1][0] == node[2][0] == "num":
        return None
    above, below = node[1][1], node[2][1]
    return above / below if above.denominator == below.denominator == 1 and 0 < above < below else None


def decadic(node: Any) -> Any:
    """Return a formula in which `log` without a base has base 10."""
    return mapped(node, lambda part: (*part, number(10)) if part[:2] == ("call", "log") and len(part) == 3 else part)


def decimal(text: str) -> Formula:
    """Return the number of digits with an optional point and exponent."""
    mantissa, _, exponent_text = text.casefold().partition("e")
    exponent = int(exponent_text or 0)
    if abs(exponent) > MAX_EXPONENT or len(mantissa) > MAX_DIGITS:
        raise Unreadable("too large")
    whole, _, part = mantissa.partition(".")
    value = Fraction(int((whole + part) or "0")) * Fraction(10) ** (exponent - len(part))
    significant = len((whole + part).lstrip("0")) if part else 0
    return ("num", value, max(0, len(part) - exponent) if part else 0, significant)


def repeating(text: str) -> Fraction | None:
    """Return the value of `0.1\\overline{6}`, `0.1(6)`, and of `0.333` before dots; None if no digits repeat.

    Before dots, the digits at the end repeat at least three times, or twice if they are several.
    """
    if len(text) > 300:
        raise Unreadable("a repeating decimal")
    match = _BARRED.fullmatch(text) or _PERIOD.fullmatch(text)
    if match is None:
        return None
    whole, fixed, repeated = match[1] or 0, match[2], match[3] or match[4]
    scale = 10 ** len(fixed)
    return int(whole) + Fraction(int(fixed or 0), scale) + Fraction(int(repeated), scale * (10 ** len(repeated) - 1))
