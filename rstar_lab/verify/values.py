"""The types of answers that `syntax` reads and `equality` compares.

A formula is a nested tuple: ("num", Fraction, decimals, significant digits), ("sym", name), ("const", "pi" | "e" | "i" | "inf"),
("+" | "*" | "/" | "^" | "pm" | "mp", left, right), ("neg" | "deg", formula), ("call", function, arguments...),
("sum" | "prod", name, from, to, body), ("int", body, name, from, to), ("lim", body, name, point), ("value", computed number).
"""

from dataclasses import dataclass, replace
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


def has(node: Any, *operations: str) -> bool:
    """Return whether a formula has one of the operations or names of functions in it."""
    if not isinstance(node, tuple):
        return False
    if node[0] in operations or (node[0] in ("call", "const") and node[1] in operations):
        return True
    return any(has(part, *operations) for part in node[1:])


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


def replaced(value: Any, old: Any, new: Any) -> Any:
    """Return a formula or a relation in which one formula takes the place of another."""
    if value == old:
        return new
    if isinstance(value, Relation):
        return replace(value, sides=tuple(replaced(side, old, new) for side in value.sides))
    return (value[0], *(replaced(part, old, new) for part in value[1:])) if isinstance(value, tuple) else value


def with_signs(node: Any, sign: int) -> Any:
    """Return a formula with one of the signs of each plus-minus sign: the upper for 1, the lower for -1."""
    if not isinstance(node, tuple):
        return node
    parts = [with_signs(part, sign) for part in node[1:]]
    if node[0] not in ("pm", "mp"):
        return (node[0], *parts)
    return ("+", *parts) if (sign > 0) == (node[0] == "pm") else difference(*parts)


def decadic(node: Any) -> Any:
    """Return a formula in which `log` without a base has base 10."""
    if not isinstance(node, tuple):
        return node
    parts = tuple(decadic(part) for part in node[1:])
    return (node[0], *parts, number(10)) if node[:2] == ("call", "log") and len(node) == 3 else (node[0], *parts)
