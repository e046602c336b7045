"""Compare sets of real numbers: intervals, inequalities, unions and differences as sorted intervals; other sets by their parts."""

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rstar_lab.verify import numeric
from rstar_lab.verify.formula_equality import FormulaComparison, replaced
from rstar_lab.verify.numeric import NeedsAlgebra, evaluate, has, symbols
from rstar_lab.verify.values import Builder, Combined, Group, Nothing, Quantity, Relation, Text, number

FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
ORDER = frozenset(("<", ">", "<=", ">="))
NUMBER_SETS = "ℝℤℕℚℂ"
_LOW, _HIGH = ("neg", ("const", "inf")), ("const", "inf")

Bound = tuple[Any, bool]  # value and whether it belongs to the interval
Intervals = list[tuple[Bound, Bound]]
_ALL: Intervals = [((_LOW, False), (_HIGH, False))]


class RealSetComparison(FormulaComparison):
    """Compares sets of real numbers."""

    def real_sets(self, one: Any, two: Any) -> bool:
        names = [self.set_name(value) for value in (one, two)]
        if names[0] and names[1] and names[0] != names[1]:
            return False
        found = []
        for value in (one, two):
            intervals = self.intervals(value)
            if intervals is None:
                if self.algebra is None and self.may_be_set(one) and self.may_be_set(two):
                    raise NeedsAlgebra
                return self.builders(one, two)
            found.append(intervals)
        if len(found[0]) != len(found[1]):
            return False
        return all(
            self.formulas(a, b) and (x == y or has(a, "inf"))
            for ours, theirs in zip(*found, strict=True)
            for (a, x), (b, y) in zip(ours, theirs, strict=True)
        )

    @staticmethod
    def may_be_set(value: Any) -> bool:
        if isinstance(value, tuple):
            return value[0] == "sym" and value[1] in NUMBER_SETS
        return not isinstance(value, Text | Quantity)

    def set_name(self, value: Any) -> str:
        """Return the name in a condition on one name, or ""."""
        if isinstance(value, Relation):
            names = frozenset().union(*(symbols(side) for side in value.sides if isinstance(side, tuple)))
            names -= set(NUMBER_SETS)
            return next(iter(names)) if len(names) == 1 else ""
        if isinstance(value, Group | Combined):
            parts = value.items if isinstance(value, Group) else value.parts
            return next(filter(None, map(self.set_name, parts)), "")
        return ""

    def intervals(self, value: Any) -> Intervals | None:
        """Return the sorted, separate intervals of a set of real numbers, or None if it is none that can be computed here."""
        if isinstance(value, Nothing):
            return []
        if value == ("sym", "ℝ"):
            return _ALL
        if isinstance(value, Combined):
            return self.combined([self.intervals(part) for part in value.parts], value.operation)
        if isinstance(value, Builder):
            parts = [self.intervals(condition) for condition in value.conditions]
            if isinstance(value.element, Relation):
                parts.append(self.intervals(value.element))
            elif not isinstance(value.element, tuple) or value.element[0] != "sym":
                return None
            return self.combined([_ALL, *parts], "cap")
        if isinstance(value, Group):
            return self.group_intervals(value)
        if isinstance(value, Relation):
            return self.relation_intervals(value)
        return None

    def combined(self, parts: Sequence[Intervals | None], operation: str) -> Intervals | None:
        """Return the intervals of sets joined by cup, cap or setminus; None if one of them has none."""
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        result = known[0]
        for part in known[1:]:
            if operation == "cup":
                result = self.union([*result, *part])
            else:
                result = self.common(result, part if operation == "cap" else self.rest(part))
        return result

    def group_intervals(self, value: Group) -> Intervals | None:
        if value.opening == "{":
            numbers = all(isinstance(item, tuple) for item in value.items)
            return self.union([((item, True), (item, True)) for item in value.items]) if numbers else None
        if value.opening:
            if len(value.items) != 2 or not all(isinstance(item, tuple) for item in value.items):
                return None
            low, high = value.items
            return self.union([((low, value.opening == "["), (high, value.closing == "]"))])
        parts = []
        first = value.items[0]
        for item in value.items:
            if isinstance(item, tuple) and isinstance(first, Relation) and first.signs == ("!=",):
                item = Relation((first.sides[0], item), ("!=",), first.names)
            part = self.intervals(item)
            if part is None:
                return None
            parts.append(part)
        excluded = any(isinstance(item, Relation) and item.signs == ("!=",) for item in value.items)
        disjoint = value.joined == "or" or (value.joined == "," and not excluded)
        if value.joined != "or" and len(parts) == 2 and (disjoint or value.joined == "and"):
            disjoint = not self.common(parts[0], parts[1])
        if disjoint:
            return self.union([interval for part in parts for interval in part])
        return self.combined(parts, "cap")

    def relation_intervals(self, value: Relation) -> Intervals | None:
        if value.signs == ("in",):
            return self.intervals(value.sides[1])
        if value.signs == ("notin",):
            inner = self.intervals(value.sides[1])
            return None if inner is None else self.rest(inner)
        if not all(isinstance(side, tuple) for side in value.sides):
            return None
        name = self.set_name(value)
        if not name or not set(value.signs) <= ORDER | {"!=", "="}:
            return None
        result = _ALL
        for left, sign, right in zip(value.sides, value.signs, value.sides[1:], strict=False):
            part = self.condition(left, sign, right, name)
            if part is None:
                return None
            result = self.common(result, part)
        return result

    def condition(self, left: Any, sign: str, right: Any, name: str) -> Intervals | None:
        """Return the solution of an inequality in one name that is linear, or linear in an absolute value."""
        if isinstance(right, tuple) and right[:2] == ("call", "abs") and not symbols(left):
            left, sign, right = right, FLIPPED[sign], left
        if isinstance(left, tuple) and left[:2] == ("call", "abs") and not symbols(right):
            inner = left[2]
            low = self.condition(
                inner, {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(sign, sign), ("neg", right), name
            )
            high = self.condition(inner, sign, right, name)
            if low is None or high is None or self.sign(right) < 0:
                return None
            return self.common(low, high) if sign in ("<", "<=", "!=") else self.union(low + high)
        if not symbols(left) and not symbols(right):
            return None
        if left == ("sym", name) and not symbols(right):
            return self.half_line(sign, right)
        if right == ("sym", name) and not symbols(left):
            return self.half_line(FLIPPED[sign], left)
        difference = ("+", left, ("neg", right))
        at = [evaluate(difference, {name: Fraction(n)}) for n in (0, 1, 2, -7)]
        slope = at[1] - at[0]
        linear = slope != 0 and numeric.close(at[2], at[0] + 2 * slope) and numeric.close(at[3], at[0] - 7 * slope)
        if not linear or not all(isinstance(value, Fraction) for value in at):
            return None if self.algebra is None else self.algebra.solution(difference, sign, name)
        return self.half_line(sign if slope > 0 else FLIPPED[sign], number(-at[0] / slope))

    def half_line(self, sign: str, bound: Any) -> Intervals:
        if sign == "=":
            return [((bound, True), (bound, True))]
        if sign == "!=":
            return [((_LOW, False), (bound, False)), ((bound, False), (_HIGH, False))]
        if sign in ("<", "<="):
            return [((_LOW, False), (bound, sign == "<="))]
        return [((bound, sign == ">="), (_HIGH, False))]

    def sign(self, value: Any) -> int:
        """Return the sign of a formula without names."""
        if has(value, "inf"):
            return -1 if value[0] == "neg" else 1
        found = numeric.real(evaluate(value, {}))
        return int(found > numeric.AGREEMENT) - int(found < -numeric.AGREEMENT)

    def order(self, one: Any, two: Any) -> int:
        """Return -1, 0 or 1 as one bound is less than, equal to or greater than the other."""
        if has(one, "inf") or has(two, "inf"):
            places = [self.sign(value) if has(value, "inf") else 0 for value in (one, two)]
            return (places[0] > places[1]) - (places[0] < places[1])
        return self.sign(("+", one, ("neg", two)))

    def union(self, parts: Sequence[tuple[Bound, Bound]]) -> Intervals:
        """Return intervals as sorted, separate ones."""
        kept: Intervals = [
            part
            for part in parts
            if (found := self.order(part[0][0], part[1][0])) < 0 or (found == 0 and part[0][1] and part[1][1])
        ]
        kept.sort(key=functools.cmp_to_key(self.by_start))
        merged: Intervals = []
        for low, high in kept:
            if merged:
                before = merged[-1][1]
                order = self.order(low[0], before[0])
                if order < 0 or (order == 0 and (low[1] or before[1])):
                    ends = self.order(high[0], before[0])
                    end = high if ends > 0 else before if ends < 0 else (high[0], high[1] or before[1])
                    merged[-1] = (merged[-1][0], end)
                    continue
            merged.append((low, high))
        return merged

    def by_start(self, one: tuple[Bound, Bound], two: tuple[Bound, Bound]) -> int:
        return self.order(one[0][0], two[0][0]) or two[0][1] - one[0][1]

    def rest(self, parts: Sequence[tuple[Bound, Bound]]) -> Intervals:
        """Return the complement of sorted intervals."""
        found, low = [], (_LOW, False)
        for start, end in parts:
            found.append((low, (start[0], not start[1] and not has(start[0], "inf"))))
            low = (end[0], not end[1])
        found.append((low, (_HIGH, False)))
        return self.union([part for part in found if not (has(part[0][0], "inf") and self.sign(part[0][0]) > 0)])

    def common(self, one: Sequence[tuple[Bound, Bound]], two: Sequence[tuple[Bound, Bound]]) -> Intervals:
        found = []
        for first in one:
            for second in two:
                lows = self.order(first[0][0], second[0][0])
                low = first[0] if lows > 0 else second[0] if lows < 0 else (first[0][0], first[0][1] and second[0][1])
                highs = self.order(second[1][0], first[1][0])
                high = (
                    first[1] if highs > 0 else second[1] if highs < 0 else (first[1][0], first[1][1] and second[1][1])
                )
                found.append((low, high))
        return self.union(found)

    def builders(self, one: Any, two: Any) -> bool:
        """Compare sets that are no intervals: by their parts, and integers in an interval with a list."""
        if isinstance(one, Builder) and isinstance(two, Builder) and len(one.conditions) == len(two.conditions):
            if self.answers(one.element, two.element) and all(map(self.answers, one.conditions, two.conditions)):
                return True
            return self.renamed(one, two)
        if isinstance(one, Combined) and isinstance(two, Combined) and one.operation == two.operation:
            if one.operation != "setminus":
                return self.unordered(one.parts, two.parts)
            return len(one.parts) == len(two.parts) and all(map(self.answers, one.parts, two.parts))
        integers = [self.integers(value) for value in (one, two)]
        if integers[0] is not None and integers[1] is not None:
            return integers[0] == integers[1]
        return False

    def renamed(self, one: Builder, two: Builder) -> bool:
        """Return whether two sets are equal after the name of the one is replaced by the name of the other."""
        names = [symbols(value.element) for value in (one, two)]
        if len(names[0]) != 1 or len(names[1]) != 1 or names[0] == names[1]:
            return False
        (old,), (new,) = names
        return self.builders(
            Builder(_rename(one.element, old, new), tuple(_rename(item, old, new) for item in one.conditions)), two
        )

    def integers_between(self, intervals: Intervals) -> set[Fraction] | None:
        found: set[Fraction] = set()
        for (low, left), (high, right) in intervals:
            first, last = self.rational(low), self.rational(high)
            if first is None or last is None or last - first > 10_000:
                return None
            numbers = {Fraction(n) for n in range(math.ceil(first), math.floor(last) + 1)}
            found |= numbers - ({first} if not left else set()) - ({last} if not right else set())
        return found

    def integers(self, value: Any) -> set[Fraction] | None:
        """Return the integers of a finite set, of an interval of integers and of unions of these."""
        if isinstance(value, Group) and value.opening == "{":
            found = [self.rational(item) for item in value.items]
            return None if None in found else set(found)  # type: ignore[arg-type]
        if isinstance(value, Combined):
            if value.operation == "cap" and ("sym", "ℤ") in value.parts and len(value.parts) == 2:
                other = next(part for part in value.parts if part != ("sym", "ℤ"))
                intervals = self.intervals(other)
                return None if intervals is None else self.integers_between(intervals)
            parts = [self.integers(part) for part in value.parts]
            if None in parts:
                return None
            methods = {"cup": "union", "cap": "intersection", "setminus": "difference"}
            joined: set[Fraction] = getattr(parts[0], methods[value.operation])(*parts[1:])
            return joined
        return None


def _rename(value: Any, old: str, new: str) -> Any:
    if isinstance(value, Relation):
        return Relation(tuple(_rename(side, old, new) for side in value.sides), value.signs, value.names)
    return replaced(value, ("sym", old), ("sym", new))
