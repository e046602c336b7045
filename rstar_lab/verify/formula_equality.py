"""Compare formulas: by their exact values, by 50 digits, or by their values at several points."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from rstar_lab.verify import numeric
from rstar_lab.verify.numeric import NeedsAlgebra, NoValue, evaluate, has, symbols
from rstar_lab.verify.values import Cases, Group, Matrix, Quantity, Relation, Text, number

MAX_ITEMS = 60


class FormulaComparison:
    """Compares formulas and matrices of formulas. `algebra`: see `equality.equal`."""

    def answers(self, one: Any, two: Any) -> bool:
        """Return whether two values are equal."""
        raise NotImplementedError

    def __init__(self, algebra: Any = None):
        self.algebra = algebra
        self.left = 500  # comparisons of parts

    def rational(self, value: Any) -> Fraction | None:
        """Return the value of a formula that is a rational number, else None."""
        if not isinstance(value, tuple) or symbols(value):
            return None
        try:
            found = evaluate(value, {})
        except (NeedsAlgebra, NoValue):
            return None
        return found if isinstance(found, Fraction) else None

    def formulas(self, one: Any, two: Any) -> bool:
        """Return whether two formulas are equal."""
        if one == two:
            return True
        if not isinstance(one, tuple) or not isinstance(two, tuple):
            return type(one) is type(two) and self.answers(one, two)
        double = [has(value, "pm", "mp") for value in (one, two)]
        if any(double):
            return all(double) and self.unordered(self.plus_minus(one), self.plus_minus(two))
        matrices = [self.as_matrix(value) is not None for value in (one, two)]
        if any(matrices):
            return all(matrices) and self.matrices(one, two)
        one, two = self.same_names(one, two)
        infinite = [has(value, "inf") and not has(value, "sum", "prod", "int", "lim") for value in (one, two)]
        if any(infinite):
            return all(infinite) and one == two
        bare = has(one, "log") or has(two, "log")
        return any(self.same_values(one, two, decadic) for decadic in ((False, True) if bare else (False,)))

    @staticmethod
    def same_names(one: Any, two: Any) -> tuple[Any, Any]:
        """Return both formulas with one spelling of the imaginary unit and of a constant of integration."""
        for mine, theirs in ((one, two), (two, one)):
            names, others = symbols(mine), symbols(theirs)
            constants = (names - others, others - names) == ({"C"}, {"c"})
            if "I" in names - others and has(theirs, "i") and not has(mine, "i"):
                changed = replaced(mine, ("sym", "I"), ("const", "i"))
            elif constants and _added(mine, "C") and _added(theirs, "c"):
                changed = replaced(mine, ("sym", "C"), ("sym", "c"))
            else:
                continue
            return (changed, two) if mine is one else (one, changed)
        return one, two

    def same_values(self, one: Any, two: Any, decadic: bool) -> bool:
        names = symbols(one) | symbols(two)
        try:
            if not names:
                return self.same_numbers(one, two, decadic)
            return self.same_at_points(one, two, names, decadic)
        except NoValue:
            return False
        except NeedsAlgebra:
            if self.algebra is None:
                raise
            return bool(self.algebra.formulas_equal(one, two, decadic))

    def same_numbers(self, one: Any, two: Any, decadic: bool) -> bool:
        left, right = evaluate(one, {}, decadic), evaluate(two, {}, decadic)
        if numeric.close(left, right):
            return True
        if one[0] == two[0] == "num" and one[2] and two[2]:
            shorter, longer = sorted((one, two), key=lambda value: value[2])
            return bool(shorter[2] < longer[2]) and numeric.rounds_to(longer[1], shorter)
        return self.rounded(one, right) or self.rounded(two, left)

    def rounded(self, decimal: Any, value: Any) -> bool:
        if decimal[0] == "neg" and decimal[1][0] == "num":
            decimal, value = decimal[1], -value
        try:
            return numeric.rounds_to(value, decimal)
        except NoValue:
            return False

    def same_at_points(self, one: Any, two: Any, names: frozenset[str], decadic: bool) -> bool:
        steps = any(
            has(value, "floor", "ceil", "mod", "gcd", "lcm", "binom", "factorial", "perm", "factorial2")
            for value in (one, two)
        )
        complex_numbers = has(one, "i") or has(two, "i")
        agreed = 0
        for values in numeric.points(names, steps):
            try:
                left, right = evaluate(one, values, decadic), evaluate(two, values, decadic)
            except NoValue:
                continue
            if not complex_numbers:
                reals = [isinstance(value, Fraction) or not getattr(value, "imag", 0) for value in (left, right)]
                if not all(reals):
                    if any(reals):
                        return False
                    continue
            if not numeric.close(left, right):
                return False
            agreed += 1
        if agreed >= 3:
            return True
        if self.algebra is None:
            raise NeedsAlgebra
        return bool(self.algebra.formulas_equal(one, two, decadic))

    def plus_minus(self, value: Any) -> list[Any]:
        """Return both values of a formula with a plus-minus sign; others as they are."""
        if isinstance(value, Relation) and value.signs == ("=",):
            return [replace(value, sides=(value.sides[0], side)) for side in self.plus_minus(value.sides[1])]
        if isinstance(value, Quantity):
            return [replace(value, formula=item) for item in self.plus_minus(value.formula)]
        if not has(value, "pm", "mp"):
            return [value]
        return [_with_signs(value, 1), _with_signs(value, -1)]

    def unordered(self, one: Sequence[Any], two: Sequence[Any]) -> bool:
        if len(one) != len(two) or len(one) > MAX_ITEMS:
            return len(one) == len(two) and all(map(self.answers, one, two))
        left = list(two)
        for place, item in enumerate(one):
            order = sorted(range(len(left)), key=lambda index: (left[index] != item, index != place))
            match = next((index for index in order if self.answers(item, left[index])), None)
            if match is None:
                return False
            left.pop(match)
        return True

    def as_matrix(self, value: Any) -> list[list[Any]] | None:
        """Return the rows of a matrix, of a number times a matrix, and of lists in brackets of equal length; None for others."""
        if isinstance(value, Matrix):
            return [list(row) for row in value.rows]
        nested = isinstance(value, Group) and value.opening == "[" and len(value.items) > 1
        if nested and all(isinstance(item, Group) and item.opening == "[" for item in value.items):
            rows = [list(item.items) for item in value.items]
            return rows if len({len(row) for row in rows}) == 1 else None
        if not isinstance(value, tuple):
            named = isinstance(value, Relation) and value.signs == ("=",) and value.names[0]
            return self.as_matrix(value.sides[1]) if named else None
        if value[0] == "neg":
            inner = self.as_matrix(value[1])
            return None if inner is None else [[("neg", cell) for cell in row] for row in inner]
        if value[0] not in ("*", "/"):
            return None
        left, right = self.as_matrix(value[1]), self.as_matrix(value[2])
        if left is not None and isinstance(value[2], tuple):
            return [[(value[0], cell, value[2]) for cell in row] for row in left]
        if right is not None and value[0] == "*" and isinstance(value[1], tuple):
            return [[("*", value[1], cell) for cell in row] for row in right]
        return None

    def matrices(self, one: Any, two: Any) -> bool:
        rows, rows_answer = self.as_matrix(one), self.as_matrix(two)
        if isinstance(one, Relation) and isinstance(two, Relation) and not same_name(one.names[0], two.names[0]):
            return False
        if rows is not None and rows_answer is not None:
            return [len(row) for row in rows] == [len(row) for row in rows_answer] and all(
                self.answers(a, b)
                for ours, theirs in zip(rows, rows_answer, strict=True)
                for a, b in zip(ours, theirs, strict=True)
            )
        matrix, other = (rows, two) if rows is not None else (rows_answer, one)
        if isinstance(other, Relation):
            other = other.sides[-1]
        if matrix is None or not isinstance(other, Group) or other.opening not in ("(", ""):
            return False
        cells = [row[0] for row in matrix] if len(matrix[0]) == 1 else matrix[0] if len(matrix) == 1 else []
        if len(cells) != len(other.items):
            return False
        return all(map(self.answers, cells, other.items) if rows is not None else map(self.answers, other.items, cells))

    def constant_ratio(self, one: Any, two: Any) -> Any:
        """Return one / two if that is the same number at all points, else None."""
        ratios = []
        for values in numeric.points(symbols(one) | symbols(two), False):
            try:
                above, below = (evaluate(value, values) for value in (one, two))
            except NoValue:
                continue
            if below == 0 or above == 0:
                continue
            if not (isinstance(above, Fraction) and isinstance(below, Fraction)):
                above, below = numeric.real(above), numeric.real(below)
            ratios.append(above / below)
        if len(ratios) < 4 or any(not numeric.close(ratio, ratios[0]) for ratio in ratios):
            return None
        return ratios[0]

    def cases(self, one: Any, two: Any) -> bool:
        ours, theirs = (self.function_in_cases(value) for value in (one, two))
        if ours is None or theirs is None or len(ours.rows) != len(theirs.rows):
            return False
        left = list(theirs.rows)
        for value, condition in ours.rows:
            match = next(
                (
                    row
                    for row in left
                    if self.answers(value, row[0])
                    and (self.otherwise(condition) or self.otherwise(row[1]) or self.answers(condition, row[1]))
                ),
                None,
            )
            if match is None:
                return False
            left.remove(match)
        return True

    @staticmethod
    def otherwise(condition: Any) -> bool:
        return condition in (Text(("otherwise",)), Text(("else",)))

    def function_in_cases(self, value: Any) -> Cases | None:
        if isinstance(value, Relation) and value.signs == ("=",):
            value = value.sides[1]
        if isinstance(value, Cases):
            return value
        if isinstance(value, tuple) and value[:2] == ("call", "abs") and len(symbols(value[2])) == 1:
            sides = value[2], number(0)
            positive, negative = (Relation(sides, (sign,), ("", "")) for sign in (">=", "<"))
            return Cases(((value[2], positive), (("neg", value[2]), negative)))
        return None


def same_name(one: str, two: str) -> bool:
    """Return whether two names are equal, or one is `y` and the other a function of x."""
    if "y" in (one, two) and re.fullmatch(r"[fghy] \( x \)", two if one == "y" else one):
        return True
    return plain_name(one) == plain_name(two)


def plain_name(name: str) -> str:
    return re.sub(r"[\s{}_]|vec|overline|\^", "", name)


def _with_signs(node: Any, sign: int) -> Any:
    if not isinstance(node, tuple):
        return node
    if node[0] in ("pm", "mp"):
        right = _with_signs(node[2], sign)
        return ("+", _with_signs(node[1], sign), right if (sign > 0) == (node[0] == "pm") else ("neg", right))
    return (node[0], *(_with_signs(part, sign) for part in node[1:]))


def replaced(node: Any, old: Any, new: Any) -> Any:
    if node == old:
        return new
    return (node[0], *(replaced(part, old, new) for part in node[1:])) if isinstance(node, tuple) else node


def _added(node: Any, name: str) -> bool:
    return (
        isinstance(node, tuple)
        and node[0] == "+"
        and (("sym", name) in node[1:] or any(_added(part, name) for part in node[1:]))
    )
