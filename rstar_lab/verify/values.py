"""The types of answers that `syntax` reads and `equality` compares.

A formula is a nested tuple: ("num", Fraction, decimals, significant digits), ("sym", name), ("const", "pi" | "e" | "i" | "inf"),
("+" | "*" | "/" | "^" | "pm" | "mp", left, right), ("neg" | "deg", formula), ("call", function, arguments...),
("sum" | "prod", name, from, to, body), ("int", body, name, from, to), ("lim", body, name, point).
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rstar_lab.verify.units import Unit

Formula = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A formula with what stands beside it. noun: words after it that are no unit. counted: all of them are in `COUNTED`."""

    formula: Any
    unit: Unit | None = None
    noun: str = ""
    counted: bool = True
    percent: bool = False
    permille: bool = False


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
    """A function in cases: rows of value and condition. name: of the function, or ""."""

    rows: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class Tagged:
    """Numbers with a meaning of their own. kind: ratio, time, date, remainder."""

    kind: str
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Based:
    """Digits in a base."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Congruent:
    """A residue and its modulus."""

    value: Any
    modulus: Any


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
