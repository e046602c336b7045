"""Compare two answers by type. docs/evaluation.md states each rule.

`Comparison` decides with numbers alone; what needs algebra raises NeedsAlgebra, or is asked of `algebra`, a module with the
functions of `symbolic`, which runs in the worker processes.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from rstar_lab.verify import units
from rstar_lab.verify.formula_equality import plain_name, same_name
from rstar_lab.verify.numeric import NeedsAlgebra, NoValue, has, symbols
from rstar_lab.verify.real_sets import FLIPPED, ORDER, RealSetComparison
from rstar_lab.verify.syntax import MAX_WORDS, plain_words, read
from rstar_lab.verify.tokens import Unreadable, tokens_of
from rstar_lab.verify.values import (
    Based,
    Builder,
    Cases,
    Choice,
    Combined,
    Congruent,
    Group,
    Matrix,
    Nothing,
    Quantity,
    Relation,
    Tagged,
    Text,
    number,
)


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text that is compared as text."""
    try:
        return plain_words([token for token in tokens_of(text) if token.text not in ("{", "}", ",", ".")])
    except Unreadable:
        return tuple(re.sub(r"\s+", "", text))


def equal(candidate: str, answer: str, algebra: Any = None) -> bool:
    """Return whether two answers are equal.

    Args:
        candidate: The answer to check.
        answer: The true answer.
        algebra: The module `symbolic`; None: raise NeedsAlgebra where it would be needed.
    """
    try:
        if tokens_of(candidate) == tokens_of(answer):
            return bool(tokens_of(answer))
    except Unreadable:
        return candidate == answer
    values = []
    for text in (candidate, answer):
        try:
            values.append(read(text))
        except Unreadable:
            return words_of(candidate) == words_of(answer)
    try:
        return Comparison(algebra).answers(*values)
    except NoValue:  # such as a bound that is 1/0
        return False


def readable(answer: str) -> bool:
    """Return whether an answer is read as a value, or is a few words."""
    try:
        value = read(answer)
    except Unreadable:
        return False
    items = value.items if isinstance(value, Group) else (value,)
    return all(len(item.words) <= MAX_WORDS for item in items if isinstance(item, Text))


class Comparison(RealSetComparison):
    """Compares values. The first argument of each method belongs to the candidate, the second to the true answer."""

    def answers(self, one: Any, two: Any) -> bool:
        """Return whether two values are equal."""
        self.left -= 1
        if self.left < 0:
            raise NeedsAlgebra
        if one == two and not isinstance(one, tuple):
            return True
        for kind, compare in self._BY_TYPE:
            if isinstance(one, kind) or isinstance(two, kind):
                return bool(compare(self, one, two))
        return self.formulas(one, two)

    def choices(self, one: Any, two: Any) -> bool:
        if isinstance(one, Choice) and isinstance(two, Choice):
            if one.letter != two.letter:
                return False
            return one.value is None or two.value is None or self.answers(one.value, two.value)
        choice, other = (one, two) if isinstance(one, Choice) else (two, one)
        if other in (("sym", choice.letter), Text((choice.letter,)), Text((choice.letter.casefold(),))):
            return True
        if choice.value is None:
            return False
        return self.answers(choice.value, two) if choice is one else self.answers(one, choice.value)

    def texts(self, one: Any, two: Any) -> bool:
        if isinstance(one, Group) or isinstance(two, Group):
            group, word = (one, two) if isinstance(one, Group) else (two, one)
            letters = [item[1] if isinstance(item, tuple) and item[0] == "sym" else "?" for item in group.items]
            return (
                len(word.words) == 1
                and word.words[0].isupper()
                and list(word.words[0]) == sorted(word.words[0]) == sorted(letters)
            )
        if isinstance(one, Relation) or isinstance(two, Relation):
            relation, other = (one, two) if isinstance(one, Relation) else (two, one)
            return relation.signs == ("=",) and self.answers(relation.sides[1], other)
        if not (isinstance(one, Text) and isinstance(two, Text)):
            word, other = (one, two) if isinstance(one, Text) else (two, one)
            if len(word.words) != 1 or not re.fullmatch("[A-Za-z]{2,4}", word.words[0]) or not isinstance(other, tuple):
                return False
            return self.formulas(_product(word.words[0]), other)
        return tuple(word.casefold() for word in one.words) == tuple(word.casefold() for word in two.words)

    def tagged(self, one: Any, two: Any) -> bool:
        if isinstance(one, Tagged) and isinstance(two, Tagged):
            if one.kind == two.kind == "time":
                halves = one.parts[2], two.parts[2]
                return one.parts[:2] == two.parts[:2] and (halves[0] == halves[1] or "" in halves)
            ours, theirs = self.ratio(one), self.ratio(two)
            if ours is None or theirs is None or len(ours) != len(theirs):
                return one == two
            return all(self.formulas(("/", a, ours[0]), ("/", b, theirs[0])) for a, b in zip(ours, theirs, strict=True))
        tagged, other = (one, two) if isinstance(one, Tagged) else (two, one)
        parts = self.ratio(tagged) if tagged.kind == "ratio" else None
        return (
            parts is not None
            and len(parts) == 2
            and isinstance(other, tuple)
            and other[0] == "/"
            and self.formulas(("/", *parts), other)
        )

    @staticmethod
    def ratio(value: Tagged) -> tuple[Any, ...] | None:
        """Return the parts of a ratio. A time without a half of the day, such as `3:20`, can be one."""
        if value.kind == "time" and not value.parts[2]:
            return number(value.parts[0]), number(value.parts[1])
        return value.parts if value.kind == "ratio" else None

    def based(self, one: Any, two: Any) -> bool:
        if isinstance(one, Based) and isinstance(two, Based):
            return one == two
        first, other = (one, two) if isinstance(one, Based) else (two, one)
        if isinstance(other, Text) and first is two:
            return other.words == (first.digits,)
        if not isinstance(other, tuple) or other[0] != "num" or other[1].denominator != 1:
            return False
        return (first.base == 10 and str(other[1]) == first.digits) or (first is two and str(other[1]) == first.digits)

    def congruences(self, one: Any, two: Any) -> bool:
        if isinstance(one, Congruent) and isinstance(two, Congruent):
            if not self.formulas(one.modulus, two.modulus):
                return False
            residues = [self.rational(value.value) for value in (one, two)]
            modulus = self.rational(one.modulus)
            if None in residues or not modulus:
                return self.answers(one.value, two.value)
            return residues[0] % modulus == residues[1] % modulus  # type: ignore[operator]
        congruent, other = (one, two) if isinstance(one, Congruent) else (two, one)
        if isinstance(other, Relation):
            other = other.sides[-1]
        residue, modulus, plain = (self.rational(value) for value in (congruent.value, congruent.modulus, other))
        if residue is None or modulus is None or plain is None or modulus <= 0:
            return False
        return 0 <= plain < modulus and residue % modulus == plain

    def quantities(self, one: Any, two: Any) -> bool:
        if not isinstance(one, Quantity | tuple) or not isinstance(two, Quantity | tuple):
            relation = one if isinstance(one, Relation) else two
            named = isinstance(relation, Relation) and relation.signs[-1] in ("=", "approx")
            return named and self.relations(one, two)
        ours, theirs = (value if isinstance(value, Quantity) else Quantity(value) for value in (one, two))
        if ours.noun != theirs.noun and not (ours.counted and theirs.counted and not (ours.noun and theirs.noun)):
            left_out = theirs.noun and not ours.noun and not theirs.counted and ours.unit is None
            if not left_out or any(word in units.PARTS for word in theirs.noun.split()):
                return False
        if (ours.percent and theirs.unit) or (theirs.percent and ours.unit):
            return False
        if ours.unit and theirs.unit:
            return self.units(ours, theirs)
        if (ours.unit and theirs.noun) or (theirs.unit and ours.noun):
            return False
        if ours.percent or theirs.percent or ours.permille or theirs.permille:
            return self.percentages(ours, theirs)
        if ours.unit == units.DEGREE or theirs.unit == units.DEGREE:
            angle, plain = (ours, theirs) if ours.unit == units.DEGREE else (theirs, ours)
            return self.formulas(ours.formula, theirs.formula) or (
                has(plain.formula, "pi") and self.formulas(("deg", angle.formula), plain.formula)
            )
        if (ours.unit or theirs.unit) and self.is_letter_unit(ours, theirs):
            return True
        return self.formulas(ours.formula, theirs.formula)

    def is_letter_unit(self, ours: Quantity, theirs: Quantity) -> bool:
        """Return whether `5 m` without `\\text` is the other quantity, which has the unit."""
        with_unit, plain = (ours, theirs) if ours.unit else (theirs, ours)
        formula = plain.formula
        if not (isinstance(formula, tuple) and formula[0] == "*" and formula[2][0] in ("sym", "^")):
            return False
        factor = formula[2]
        letter, power = (factor[1], 1) if factor[0] == "sym" else (factor[1][1], self.rational(factor[2]))
        unit = units.UNITS.get(str(letter))
        if unit is None or power is None:
            return False
        return self.units(Quantity(formula[1], units.ONE.times(unit, int(power))), with_unit)

    def units(self, ours: Quantity, theirs: Quantity) -> bool:
        first, second = ours.unit, theirs.unit
        assert first is not None and second is not None
        if units.GENERIC in (first, second) or first == second:
            return self.formulas(ours.formula, theirs.formula)
        if first.dimensions != second.dimensions:
            return False
        return self.formulas(("*", ours.formula, number(first.factor)), ("*", theirs.formula, number(second.factor)))

    def percentages(self, ours: Quantity, theirs: Quantity) -> bool:
        if (ours.percent, ours.permille) == (theirs.percent, theirs.permille):
            return self.formulas(ours.formula, theirs.formula)
        scaled = [
            ("/", value.formula, number(100 if value.percent else 1000))
            if value.percent or value.permille
            else value.formula
            for value in (ours, theirs)
        ]
        if self.formulas(scaled[0], scaled[1]):
            return True
        if ours.permille or theirs.permille:
            return False
        percent = self.rational((ours if ours.percent else theirs).formula)
        return (percent is None or abs(percent) >= 1) and self.formulas(ours.formula, theirs.formula)

    def relations(self, one: Any, two: Any) -> bool:
        ordered = [self.is_order(value) for value in (one, two)]
        if any(ordered):
            if all(ordered) and self.same_inequality(one, two):
                return True
            return self.real_sets(one, two)
        if isinstance(one, Relation) and isinstance(two, Relation):
            return self.equations(one, two)
        relation, other = (one, two) if isinstance(one, Relation) else (two, one)
        if isinstance(other, Group):
            side = relation.sides[-1]
            return self.answers(side, two) if relation is one else self.answers(one, side)
        if relation.signs == ("in",):
            if other == ("sym", "ℝ") or relation.sides[1] == ("sym", "ℝ"):
                return self.real_sets(one, two)
            return self.answers(relation.sides[1], two) if relation is one else self.answers(one, relation.sides[1])
        if relation.signs[-1] == "approx":
            return self.approximation(relation, other, relation is one)
        if set(relation.signs) == {"equiv"}:
            relation = Relation(relation.sides, ("=",) * len(relation.signs), relation.names)
        if set(relation.signs) != {"="}:
            return False
        return self.chain(relation, other, relation is one)

    @staticmethod
    def is_order(value: Any) -> bool:
        return isinstance(value, Relation) and bool(set(value.signs) & (ORDER | {"!=", "notin"}))

    def chain(self, relation: Relation, other: Any, ours: bool) -> bool:
        """Compare `name = ... = value` with a value. Every part without a name must equal the value."""
        sides, names = list(relation.sides), list(relation.names)
        if len(sides) == 2 and names[1] and not names[0]:
            sides, names = sides[::-1], names[::-1]
        last = sides[-1]
        if not ours and not any(names):
            return False
        for side, name in zip(sides[:-1], names[:-1], strict=True):
            if name:
                continue
            if isinstance(side, tuple) and symbols(side):
                if not ours and len(sides) == 2:
                    return False
                if isinstance(other, tuple) and symbols(other):
                    return False
            elif not self.answers(side, last):
                return False
        return self.answers(last, other) if ours else self.answers(other, last)

    def approximation(self, relation: Relation, other: Any, ours: bool) -> bool:
        exact, rounded = relation.sides[-2], relation.sides[-1]
        left, right = self.rational(exact), self.rational(rounded)
        if None not in (left, right) and rounded[0] == "num" and round(left, rounded[2]) != right:  # type: ignore[arg-type]
            return False
        if relation.names[-2]:
            return self.answers(rounded, other) if ours else self.answers(other, rounded)
        return self.answers(exact, other) if ours else self.answers(other, exact) or self.answers(other, rounded)

    def equations(self, one: Relation, two: Relation) -> bool:
        signs = set(one.signs) | set(two.signs)
        if signs - {"=", "equiv"}:
            return (
                one.signs == two.signs
                and len(one.sides) == len(two.sides)
                and all(map(self.answers, one.sides, two.sides))
            )
        ours, theirs = (_name_first(relation) for relation in (one, two))
        if ours[0] and theirs[0]:
            if same_name(ours[0], theirs[0]) and all(self.consistent(value) for value in (one, two)):
                return self.answers(ours[1], theirs[1])
            if len(one.sides) > 2 or len(two.sides) > 2 or not self.share_symbols(one, two):
                return False
        if len(one.sides) != len(two.sides):
            return False
        if len(one.sides) > 2:
            return all(map(self.answers, one.sides, two.sides))
        differences = []
        for relation in (one, two):
            if not all(isinstance(side, tuple) for side in relation.sides):
                return all(map(self.answers, one.sides, two.sides))
            differences.append(("+", relation.sides[0], ("neg", relation.sides[1])))
        return self.same_equation(differences[0], differences[1])

    @staticmethod
    def share_symbols(one: Relation, two: Relation) -> bool:
        names = [frozenset().union(*(symbols(side) for side in relation.sides)) for relation in (one, two)]
        return names[0] == names[1] and len(names[0]) > 1

    def consistent(self, relation: Relation) -> bool:
        return len(relation.sides) <= 2 or all(self.answers(side, relation.sides[-1]) for side in relation.sides[1:-1])

    def same_equation(self, one: Any, two: Any) -> bool:
        names = symbols(one)
        if names != symbols(two) or not names:
            return False
        ratio = self.constant_ratio(one, two)
        if ratio is not None:
            return True
        if self.algebra is None:
            raise NeedsAlgebra
        return bool(self.algebra.equations_equal(one, two))

    def same_inequality(self, one: Relation, two: Relation) -> bool:
        if len(one.sides) != len(two.sides):
            return False
        for sides, signs in (
            (two.sides, two.signs),
            (two.sides[::-1], tuple(FLIPPED.get(sign, "?") for sign in two.signs[::-1])),
        ):
            if one.signs == signs and all(map(self.answers, one.sides, sides)):
                return True
        if len(one.sides) != 2 or len(symbols(one.sides[0]) | symbols(one.sides[1])) < 2:
            return False
        differences = []
        for relation in (one, two):
            sides = relation.sides if relation.signs[0] in ("<", "<=", "!=") else relation.sides[::-1]
            differences.append(("+", sides[0], ("neg", sides[1])))
        strict = [relation.signs[0].rstrip("=") == relation.signs[0] for relation in (one, two)]
        ratio = self.constant_ratio(differences[0], differences[1])
        return strict[0] == strict[1] and ratio is not None and bool(ratio > 0)

    def groups(self, one: Any, two: Any) -> bool:
        ours, theirs = (self.without_brackets(value) for value in (one, two))
        if any(self.is_order(value) or value == ("sym", "ℝ") for value in (ours, theirs)):
            return self.real_sets(ours, theirs)
        named = [self.named(value) for value in (ours, theirs)]
        if any(named):
            return self.named_values(ours, theirs, named[0], named[1])
        if isinstance(ours, Group) and isinstance(theirs, Group):
            return self.two_groups(ours, theirs)
        both = (ours, theirs)
        if any(self.as_matrix(v) is not None for v in both) and not any(isinstance(v, Combined) for v in both):
            return self.matrices(ours, theirs)
        group, other = (ours, theirs) if isinstance(ours, Group) else (theirs, ours)
        orders = [self.is_order(item) for item in group.items]
        if (
            isinstance(other, Combined | Builder)
            or (group.joined in ("or", "and") and any(orders))
            or (group.opening == "" and all(orders))
        ):
            return self.real_sets(ours, theirs)
        plain = group.text and isinstance(other, tuple | Quantity)
        if plain and re.fullmatch(r"\d+,\d+", group.text):
            return isinstance(other, tuple) and self.formulas(_decimal_comma(group.text), other)
        if (mixed := _mixed_number(group)) is not None and isinstance(other, tuple | Quantity):
            return self.answers(mixed, theirs) if group is ours else self.answers(ours, mixed)
        values = self.plus_minus(other)
        if len(values) > 1 and group.opening in ("", "{"):
            return self.unordered(self.expanded(group.items), values)
        if group.opening == "{" and len(group.items) == 1 and not isinstance(group.items[0], Nothing):
            item = group.items[0]
            return self.answers(item, theirs) if group is ours else self.answers(ours, item)
        return False

    def expanded(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return items with both values of each formula with a plus-minus sign."""
        return tuple(item for value in items for item in self.plus_minus(value))

    @staticmethod
    def without_brackets(value: Any) -> Any:
        """Return the list inside of a list of one group, `name = list` as its list, and other values as they are."""
        if isinstance(value, Relation) and value.signs == ("in",):
            return value.sides[1]
        return value

    def two_groups(self, one: Group, two: Group) -> bool:
        kinds = {one.opening, two.opening}
        if one.joined != two.joined and "or" in (one.joined, two.joined):
            words = any(isinstance(item, Text) for item in one.items)
            labels = any(isinstance(item, tuple) and item[0] == "sym" and item[1].isupper() for item in one.items)
            if words or labels or _names_differ(one) or _names_differ(two):
                return False
        if any(self.is_order(item) for item in (*one.items, *two.items)):
            return self.real_sets(one, two)
        ours: Sequence[Any] = one.items
        theirs: Sequence[Any] = two.items
        if (
            kinds <= {"", "{"}
            or (kinds == {"", "["} and max(len(ours), len(theirs)) > 2)
            or (kinds == {"{", "["} and len(ours) > 2)
        ):
            ours, theirs = self.expanded(ours), self.expanded(theirs)
            if "{" in kinds:
                ours, theirs = self.distinct(ours), self.distinct(theirs)
            return self.unordered(ours, theirs)
        if kinds == {"", "("} or (one.opening, one.closing) == (two.opening, two.closing):
            return len(ours) == len(theirs) and all(map(self.answers, ours, theirs))
        return False

    def distinct(self, items: Sequence[Any]) -> tuple[Any, ...]:
        kept: list[Any] = []
        for item in items:
            if not any(self.answers(item, other) for other in kept):
                kept.append(item)
        return tuple(kept)

    def named(self, value: Any) -> dict[str, Any] | None:
        """Return the values by name of `x=1, y=2`, `(x,y)=(1,2)` and a system; None for other values."""
        if isinstance(value, Relation) and value.signs == ("=",):
            names, items = value.names, value.sides
            order = 0 if names[0].startswith("(") else 1 if names[1].startswith("(") else None
            if order is not None and isinstance(items[1 - order], Group):
                keys = re.findall(r"[^(),]+", names[order])
                values = items[1 - order].items
                return dict(zip(keys, values, strict=True)) if len(keys) == len(values) == len(set(keys)) else None
            return None
        if not isinstance(value, Group) or value.opening not in ("", "{") or value.joined == "or":
            return None
        found: dict[str, Any] = {}
        for item in value.items:
            if not isinstance(item, Relation) or item.signs != ("=",):
                return None
            name, side = _name_first(item)
            if not name or name in found:
                return None
            found[name] = side
        return found if len(found) > 1 else None

    def named_values(self, one: Any, two: Any, ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> bool:
        if ours and theirs:
            keys = {plain_name(name): name for name in theirs}
            if {plain_name(name) for name in ours} != keys.keys():
                return False
            return all(self.answers(value, theirs[keys[plain_name(name)]]) for name, value in ours.items())
        names = ours or theirs
        other = two if ours else one
        assert names is not None
        if isinstance(other, Relation) and other.signs == ("=",):
            other = other.sides[1]
        matrix = self.as_matrix(other)
        if matrix is not None and len(matrix[0]) == 1:
            items = [row[0] for row in matrix]
        elif isinstance(other, Group) and other.opening in ("", "(") and other.joined != "or":
            items = list(other.items)
        else:
            return False
        if any(isinstance(item, Relation) for item in items):
            return False
        in_tuple = isinstance(one if ours else two, Relation)
        ordered = list(names.values()) if in_tuple else [names[name] for name in sorted(names, key=_natural)]
        if len(items) != len(ordered):
            return False
        return all(map(self.answers, ordered, items) if ours else map(self.answers, items, ordered))

    _BY_TYPE: tuple[tuple[Any, Callable[..., bool]], ...] = (
        (Choice, choices), (Based, based), (Congruent, congruences), (Tagged, tagged), (Cases, RealSetComparison.cases),
        (Text, texts), (Combined, RealSetComparison.real_sets),
        (Builder, RealSetComparison.real_sets), (Group, groups), (Nothing, lambda *_: False), (Relation, relations), (Quantity, quantities),
        (Matrix, RealSetComparison.matrices),
    )  # fmt: skip


def _product(letters: str) -> Any:
    """Return the product of letters."""
    factors = [("const", char) if char in "ei" else ("sym", char) for char in letters]
    value: Any = factors[0]
    for factor in factors[1:]:
        value = ("*", value, factor)
    return value


def _natural(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"\d+|\D", plain_name(name))]


def _name_first(relation: Relation) -> tuple[str, Any]:
    """Return (name, value) of `name = value` or `value = name`; the name is "" if there is none."""
    if relation.names[0]:
        return relation.names[0], relation.sides[-1]
    if len(relation.sides) == 2 and relation.names[1]:
        return relation.names[1], relation.sides[0]
    return "", relation.sides[-1]


def _names_differ(group: Group) -> bool:
    return len({_name_first(item)[0] for item in group.items if isinstance(item, Relation)}) > 1


def _mixed_number(group: Group) -> Any:
    """Return the number of `5 and 1/2`, or None for other lists."""
    if group.joined != "and" or len(group.items) != 2:
        return None
    whole, part = group.items
    fraction = part.formula if isinstance(part, Quantity) else part
    if not (
        isinstance(whole, tuple)
        and whole[0] == "num"
        and whole[1].denominator == 1
        and isinstance(fraction, tuple)
        and fraction[0] == "/"
    ):
        return None
    if fraction[1][0] != "num" or fraction[2][0] != "num" or not 0 < fraction[1][1] < fraction[2][1]:
        return None
    total = number(whole[1] + fraction[1][1] / fraction[2][1])
    return Quantity(total, part.unit, part.noun, part.counted) if isinstance(part, Quantity) else total


def _decimal_comma(text: str) -> Any:
    whole, _, part = text.partition(",")
    return ("num", Fraction(int(whole + part), 10 ** len(part)), len(part), len((whole + part).lstrip("0")))
