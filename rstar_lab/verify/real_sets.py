"""Sets of real numbers: intervals, inequalities, unions, differences, integers in an interval.

A set is known by the points at which membership can change and by a test of membership. Two sets are equal if they begin and
end at the same points.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rstar_lab.verify.numeric import INFINITY, NotComputed, NoValue, Number, as_fraction, evaluate
from rstar_lab.verify.roots import boundary
from rstar_lab.verify.values import Builder, Combined, Formula, Group, Nothing, Relation, number, symbols

ORDER = frozenset(("<", ">", "<=", ">="))
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
NUMBER_SETS = "ℝℤℕℚℂ"
MAX_INTEGERS = 10_000
TOLERANCE = Fraction(1, 10**35)  # relative
ROUNDING = Fraction(1, 10**42)  # absolute, of the value of a formula at its root

Contains = Callable[[Number], bool]
_JOINS: dict[str, Callable[[Sequence[bool]], bool]] = {
    "cup": any, "cap": all, "setminus": lambda found: found[0] and not any(found[1:]),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RealSet:
    """A set of real numbers. points: formulas of all numbers at which membership can change. integers: it has nothing else."""

    points: tuple[Formula, ...]
    contains: Contains
    integers: bool = False

    def profile(self) -> tuple[list[Formula], list[bool]]:
        """Return the points at which the set begins or ends, and membership below the first, at it, above it, ..., above the last."""
        located: list[tuple[Number, Formula]] = []
        for point in sorted(self.points, key=located_at):
            place = located_at(point)
            if abs(place) != math.inf and not (located and _sign(place, located[-1][0]) == 0):
                located.append((place, point))
        places = [place for place, _ in located]
        samples = [places[0] - 1, places[0]] if places else [Fraction(0)]
        for low, high in itertools.pairwise(places):
            samples += [(low + high) / 2, high]
        found = [self.contains(sample) for sample in [*samples, *([places[-1] + 1] if places else [])]]
        kept, pattern = [], found[:1]
        for index, (_, point) in enumerate(located):
            if not pattern[-1] == found[2 * index + 1] == found[2 * index + 2]:
                kept.append(point)
                pattern += found[2 * index + 1 : 2 * index + 3]
        return kept, pattern


ALL, NONE = RealSet((), lambda _: True), RealSet((), lambda _: False)
INTEGERS = RealSet((), lambda place: isinstance(place, Fraction) and place.denominator == 1, integers=True)


def located_at(bound: Formula, values: dict[str, Fraction] | None = None) -> Any:
    """Return the place of a bound on the line: a fraction, with 50 digits if it is not exact, or a float for infinity."""
    if bound in (INFINITY, ("neg", INFINITY)):
        return math.inf if bound == INFINITY else -math.inf
    return as_fraction(evaluate(bound, values or {}))


def _sign(place: Any, bound: Any) -> int:
    """Return -1, 0 or 1 as a number is less than, equal to or greater than a bound, to 35 digits."""
    finite = isinstance(place, Fraction) and isinstance(bound, Fraction)
    inexact = finite and (place.denominator | bound.denominator) >> 99
    if inexact and abs(place - bound) <= max(abs(place), abs(bound)) * TOLERANCE + ROUNDING:
        return 0
    return (place > bound) - (place < bound)


def set_name(value: Any) -> str:
    """Return the name in a condition on one name, or ""."""
    if isinstance(value, Relation):
        names = symbols(*value.sides) - set(NUMBER_SETS)
        return next(iter(names)) if len(names) == 1 else ""
    parts = value.items if isinstance(value, Group) else value.parts if isinstance(value, Combined) else ()
    return next(filter(None, map(set_name, parts)), "")


def is_order(value: Any) -> bool:
    """Return whether a value is an inequality or excludes a value."""
    return isinstance(value, Relation) and bool(set(value.signs) & (ORDER | {"!=", "notin"}))


def real_set(value: Any) -> RealSet | None:
    """Return a value as a set of real numbers; None if it is none that can be computed."""
    if isinstance(value, Nothing | tuple):
        return {Nothing(): NONE, ("sym", "ℝ"): ALL, ("sym", "ℤ"): INTEGERS}.get(value)
    if isinstance(value, Combined):
        return _joined(list(map(real_set, value.parts)), value.operation)
    if isinstance(value, Builder):
        conditions = list(value.conditions)
        if isinstance(value.element, Relation):
            conditions.append(value.element)
        elif not isinstance(value.element, tuple) or value.element[0] != "sym":
            return None
        return _joined([ALL, *map(real_set, conditions)], "cap")
    if isinstance(value, Group):
        return _bracketed(value) if value.opening else _listed(value)
    return _related(value) if isinstance(value, Relation) else None


def _joined(parts: Sequence[RealSet | None], operation: str) -> RealSet | None:
    sets = [part for part in parts if part is not None]
    if len(sets) < len(parts):
        return None
    points = tuple(point for part in sets for point in part.points)
    join = _JOINS[operation]

    def contains(place: Number) -> bool:
        return join([part.contains(place) for part in sets])

    if any(part.integers for part in sets):
        if operation != "cap":
            return None
        places = [place for place in map(located_at, points) if abs(place) != math.inf]
        low, high = (math.floor(min(places)), math.ceil(max(places))) if places else (0, 0)
        if high - low > MAX_INTEGERS or contains(Fraction(low - 1)) or contains(Fraction(high + 1)):
            return None
        points = tuple(number(n) for n in range(low, high + 1))
    return RealSet(points, contains)


def _bracketed(value: Group) -> RealSet | None:
    if not all(isinstance(item, tuple) and not symbols(item) for item in value.items):
        return None
    places = [located_at(item) for item in value.items]
    if value.opening == "{":
        return RealSet(value.items, lambda place: any(_sign(place, item) == 0 for item in places))
    if len(places) != 2:
        return None

    def contains(place: Number) -> bool:
        low, high = _sign(place, places[0]), _sign(place, places[1])
        return (low > 0 or (low == 0 and value.opening == "[")) and (high < 0 or (high == 0 and value.closing == "]"))

    return RealSet(value.items, contains)


def _listed(value: Group) -> RealSet | None:
    """Return the set of conditions that commas, `and` or `or` join.

    Two that exclude each other are alternatives with a comma. With `and` they have no set, because some write `and` for `or`.
    """
    first = value.items[0]
    excluding = isinstance(first, Relation) and first.signs == ("!=",)
    items = [
        Relation((first.sides[0], item), ("!=",), first.names) if excluding and isinstance(item, tuple) else item
        for item in value.items
    ]
    parts = list(map(real_set, items))
    excluded = any(isinstance(item, Relation) and item.signs == ("!=",) for item in items)
    common = None if value.joined == "or" else _joined(parts, "cap")
    met = common is not None and any(common.profile()[1])
    if value.joined == "and":
        return common if met else None
    return common if (excluded and value.joined == ",") or (met and len(parts) == 2) else _joined(parts, "cup")


def _related(value: Relation) -> RealSet | None:
    if value.signs in (("in",), ("notin",)):
        inner = real_set(value.sides[1])
        return inner if value.signs == ("in",) else _joined([ALL, inner], "setminus")
    name = set_name(value)
    formulas = all(isinstance(side, tuple) for side in value.sides)
    if not name or not formulas or not set(value.signs) <= ORDER | {"!=", "="}:
        return None
    conditions = zip(value.sides, value.signs, value.sides[1:], strict=False)
    return _joined([_condition(*condition, name) for condition in conditions], "cap")


def _condition(left: Formula, sign: str, right: Formula, name: str) -> RealSet | None:
    """Return the solution of a relation between two formulas with one name."""
    if not symbols(left, right):
        return None
    try:
        points = boundary(left, right, name)
    except (NotComputed, NoValue):
        return None

    def contains(place: Number) -> bool:
        try:
            found = _sign(*(located_at(side, {name: place}) for side in (left, right)))
        except NoValue:
            return False
        return {-1: sign in ("<", "<=", "!="), 0: sign in ("=", "<=", ">="), 1: sign in (">", ">=", "!=")}[found]

    return RealSet(tuple(points), contains)
