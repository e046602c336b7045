"""Compare two answers by type. docs/evaluation.md states each rule."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rstar_lab.verify import units
from rstar_lab.verify.numeric import comparison, constant_ratio, rational, real, same_formulas, spend
from rstar_lab.verify.real_sets import FLIPPED, is_order, real_set, set_name
from rstar_lab.verify.roots import same_solutions
from rstar_lab.verify.syntax import read
from rstar_lab.verify.tokens import Unreadable, tokens_of
from rstar_lab.verify.values import (
    Builder,
    Cases,
    Choice,
    Combined,
    Group,
    Matrix,
    Nothing,
    Quantity,
    Relation,
    Tagged,
    Text,
    decimal,
    difference,
    has,
    number,
    product,
    proper,
    replaced,
    symbols,
)  # fmt: skip

PART_STEPS = 200  # steps that the comparison of two parts of answers takes
REALS = ("sym", "ℝ")
_OTHERWISE = (("otherwise",), ("else",))


def equal(candidate: str, answer: str) -> bool:
    """Return whether two answers are equal. candidate: the answer to check. answer: the true answer."""
    try:
        with comparison():
            return Comparison().answers(read(candidate), read(answer))
    except Unreadable:
        ours, theirs = ([t.text for t in tokens_of(text) if t.text not in (",", ".")] for text in (candidate, answer))
        return ours == theirs != []


class Comparison:
    """Compares values. The first of two values belongs to the candidate, the second to the true answer.

    A rule for a value of one type and another value has them in this order, and `ours`: whether the first is the candidate's.
    """

    def answers(self, one: Any, two: Any) -> bool:
        """Return whether two values are equal."""
        spend(PART_STEPS)
        if one == two:
            return True
        for kind, alike, mixed in self._RULES:
            ours, theirs = isinstance(one, kind), isinstance(two, kind)
            if (ours or theirs) and (mixed is None or (ours and theirs)):
                return bool(alike(self, one, two))
            if ours or theirs:
                return bool(mixed(self, one, two, True) if ours else mixed(self, two, one, False))
        return same_formulas(one, two)

    def all_answers(self, ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
        """Return whether the values of two sequences are equal in their order."""
        return len(ours) == len(theirs) and all(map(self.answers, ours, theirs))

    def inner(self, part: Any, other: Any, ours: bool) -> bool:
        """Compare a part of one answer with the other answer."""
        return self.answers(part, other) if ours else self.answers(other, part)

    def unordered(self, ours: Sequence[Any], theirs: Sequence[Any], same: Callable[..., bool] | None = None) -> bool:
        """Return whether each value of one sequence has its own equal value in the other."""
        same = same or self.answers
        if len(ours) != len(theirs):
            return False
        left = list(theirs)
        for place, item in enumerate(ours):
            order = sorted(range(len(left)), key=lambda index: (left[index] != item, index != place))
            match = next((index for index in order if same(item, left[index])), None)
            if match is None:
                return False
            left.pop(match)
        return True

    # --- lists, tuples, matrices

    def groups(self, one: Group, two: Group) -> bool:
        if named_parts(one) or named_parts(two):
            return self.named_values(one, two)
        if one.joined != two.joined and "or" in (one.joined, two.joined) and (_alternatives(one) or _alternatives(two)):
            return False
        if any(is_order(item) for item in (*one.items, *two.items)):
            return self.real_sets(one, two)
        kinds = {one.opening, two.opening}
        most = max(len(one.items), len(two.items))
        if kinds <= {"", "{"} or (kinds in ({"", "["}, {"{", "["}) and most > 2):
            distinct = self.distinct if "{" in kinds else list
            return self.unordered(distinct(one.items), distinct(two.items))
        same_brackets = (one.opening, one.closing) == (two.opening, two.closing)
        return (same_brackets or (_is_tuple(one) and _is_tuple(two))) and self.all_answers(one.items, two.items)

    def group(self, group: Group, other: Any, ours: bool) -> bool:
        ordered = [is_order(item) for item in group.items]
        statements = (group.joined != "," and any(ordered)) or (group.opening == "" and all(ordered))
        if is_order(other) or other == REALS or (statements and not isinstance(other, Relation)):
            return self.real_sets(group, other)
        if isinstance(other, Relation):
            named = named_parts(group) and named_parts(other)
            return self.named_values(group, other) if named else self.relation(other, group, not ours)
        if isinstance(other, Matrix):
            cells = [cell for row in other.rows for cell in row]
            flat = group.opening in ("(", "") and len(cells) == max(len(other.rows), len(other.rows[0]))
            return flat and self.all_answers(_in_order(group), cells)
        if re.fullmatch(r"\d+,\d+", group.text):
            return isinstance(other, tuple) and self.answers(decimal(group.text.replace(",", ".")), other)
        if (mixed := _mixed_number(group)) is not None:
            return self.inner(mixed, other, ours)
        alone = group.opening == "{" and len(group.items) == 1 and not isinstance(group.items[0], Nothing)
        return alone and self.inner(group.items[0], other, ours)

    def distinct(self, items: Sequence[Any]) -> list[Any]:
        kept: list[Any] = []
        for item in items:
            if not any(self.answers(item, other) for other in kept):
                kept.append(item)
        return kept

    def named_values(self, one: Any, two: Any) -> bool:
        """Compare named values by name, or in the order of the alphabet with values without names."""
        ours, theirs = named_parts(one), named_parts(two)
        if ours and theirs:
            return ours.keys() == theirs.keys() and all(self.answers(ours[name], theirs[name]) for name in ours)
        return _is_tuple(two if ours else one) and self.all_answers(_in_order(one), _in_order(two))

    def matrices(self, one: Matrix, two: Matrix) -> bool:
        return len(one.rows) == len(two.rows) and all(map(self.all_answers, one.rows, two.rows))

    def cases(self, one: Any, two: Any) -> bool:
        ours, theirs = _function_in_cases(one), _function_in_cases(two)
        return ours is not None and theirs is not None and self.unordered(ours.rows, theirs.rows, self.rows)

    def rows(self, one: tuple[Any, Any], two: tuple[Any, Any]) -> bool:
        otherwise = any(isinstance(row[1], Text) and row[1].words in _OTHERWISE for row in (one, two))
        return self.answers(one[0], two[0]) and (otherwise or self.answers(one[1], two[1]))

    # --- sets, equations, inequalities

    def real_sets(self, one: Any, two: Any) -> bool:
        names = set_name(one), set_name(two)
        if all(names) and names[0] != names[1]:
            return False
        ours, theirs = real_set(one), real_set(two)
        if ours is None or theirs is None or ours.integers or theirs.integers:
            return self.set_parts(one, two)
        (points, pattern), (others, other_pattern) = ours.profile(), theirs.profile()
        return pattern == other_pattern and all(map(self.answers, points, others))

    def set_parts(self, one: Any, two: Any) -> bool:
        """Compare sets whose members are unknown by their parts."""
        if isinstance(one, Builder) and isinstance(two, Builder):
            names = symbols(one.element), symbols(two.element)
            if len(names[0]) == len(names[1]) == 1:
                one = replaced(one, *(("sym", *name) for name in names))
            return self.answers(one.element, two.element) and self.all_answers(one.conditions, two.conditions)
        if isinstance(one, Combined) and isinstance(two, Combined) and one.operation == two.operation:
            return (self.all_answers if one.operation == "setminus" else self.unordered)(one.parts, two.parts)
        joined = isinstance(one, Group) and isinstance(two, Group) and one.joined == two.joined
        return joined and self.unordered(one.items, two.items)

    def relations(self, one: Relation, two: Relation) -> bool:
        ordered = is_order(one), is_order(two)
        if any(ordered):
            return (all(ordered) and self.same_inequality(one, two)) or self.real_sets(one, two)
        if {*one.signs, *two.signs} - {"=", "equiv"}:
            return one.signs == two.signs and self.all_answers(one.sides, two.sides)
        if one.names[0] and two.names[0]:
            if same_name(one.names[0], two.names[0]):
                middle = [(side, r.sides[-1]) for r in (one, two) for side in r.sides[1:-1]]
                if all(self.answers(*pair) for pair in middle):
                    return self.answers(one.sides[-1], two.sides[-1])
            if max(len(one.sides), len(two.sides)) > 2 or len(symbols(*one.sides)) < 2:
                return False
        if not len(one.sides) == len(two.sides) == 2 or not all(isinstance(s, tuple) for s in (*one.sides, *two.sides)):
            return self.all_answers(one.sides, two.sides)
        ours, theirs = difference(*one.sides), difference(*two.sides)
        return constant_ratio(ours, theirs) is not None or same_solutions(ours, theirs)

    def same_inequality(self, one: Relation, two: Relation) -> bool:
        """Return whether the sides are equal, or differences of sides with several names have a positive constant ratio."""
        flipped = tuple(FLIPPED.get(sign, "?") for sign in two.signs[::-1])
        for sides, signs in ((two.sides, two.signs), (two.sides[::-1], flipped)):
            if one.signs != signs:
                continue
            if self.all_answers(one.sides, sides):
                return True
            if len(sides) == 2 and len(symbols(*sides)) > 1:
                ratio = constant_ratio(difference(*one.sides), difference(*sides))
                if ratio is not None and real(ratio) > 0:
                    return True
        return False

    def relation(self, relation: Relation, other: Any, ours: bool) -> bool:
        """Compare `name = ... = value` with a value. Every part without a name must equal the value."""
        sides, signs, names = relation.sides, set(relation.signs), relation.names
        if is_order(relation) or (signs == {"in"} and REALS in (other, sides[1])):
            return self.real_sets(relation, other)
        if signs == {"in"}:
            return self.inner(sides[1], other, ours)
        if relation.signs[-1] == "approx":
            return self.approximation(relation, other, ours)
        if signs not in ({"="}, {"equiv"}) or (not ours and not any(names)):
            return False
        for side in (side for side, name in zip(sides[:-1], names, strict=False) if not name):
            if symbols(side):
                if (not ours and len(sides) == 2) or symbols(other):
                    return False
            elif not self.answers(side, sides[-1]):
                return False
        return self.inner(sides[-1], other, ours)

    def approximation(self, relation: Relation, other: Any, ours: bool) -> bool:
        exact, rounded = relation.sides[-2:]
        left, right = rational(exact), rational(rounded)
        if left is not None and right is not None and rounded[0] == "num" and round(left, rounded[2]) != right:
            return False
        if relation.names[-2]:
            return self.inner(rounded, other, ours)
        return self.inner(exact, other, ours) or (not ours and self.answers(other, rounded))

    # --- numbers with something beside them

    def quantities(self, one: Any, two: Any) -> bool:
        ours, theirs = (value if isinstance(value, Quantity) else Quantity(value) for value in (one, two))
        if ours.noun != theirs.noun and not (ours.counted and theirs.counted and not (ours.noun and theirs.noun)):
            left_out = theirs.noun and not ours.noun and not theirs.counted and ours.unit is None
            if not left_out or any(word in units.PARTS for word in theirs.noun.split()):
                return False
        if ours.unit and theirs.unit:
            return self.units(ours, theirs)
        if (ours.unit and theirs.noun) or (theirs.unit and ours.noun):
            return False
        unit = ours.unit or theirs.unit
        measured, plain = (ours.formula, theirs.formula) if ours.unit else (theirs.formula, ours.formula)
        if unit in (units.PERCENT, units.PERMILLE):
            if self.answers(("*", measured, number(unit.factor)), plain):
                return True
            value = rational(measured)
            return unit == units.PERCENT and (value is None or abs(value) >= 1) and self.answers(measured, plain)
        if self.answers(measured, plain):
            return True
        if unit == units.DEGREE:
            return has(plain, "pi") and self.answers(("deg", measured), plain)
        return unit is not None and self.is_letter_unit(measured, unit, plain)

    def is_letter_unit(self, measured: Any, unit: units.Unit, plain: Any) -> bool:
        """Return whether a product such as `5m` without `\\text` is a quantity."""
        for name, power in itertools.product(symbols(plain) & units.SINGLE_LETTERS & units.UNITS.keys(), (1, 2, 3)):
            letter = units.ONE.times(units.UNITS[name], power)
            if letter.dimensions == unit.dimensions:
                scaled = ("*", measured, number(unit.factor / letter.factor))
                return self.answers(("*", scaled, ("^", ("sym", name), number(power))), plain)
        return False

    def units(self, ours: Quantity, theirs: Quantity) -> bool:
        first, second = ours.unit, theirs.unit
        assert first is not None and second is not None
        shares = {first, second} & {units.PERCENT, units.PERMILLE}
        if first == second or (units.GENERIC in (first, second) and not shares):
            return self.answers(ours.formula, theirs.formula)
        scaled = (("*", value.formula, number(unit.factor)) for value, unit in ((ours, first), (theirs, second)))
        return first.dimensions == second.dimensions and self.answers(*scaled)

    def tagged(self, one: Tagged, two: Tagged) -> bool:
        if one.kind == two.kind == "time":
            hours = [hour % 12 + 12 * (half == "p") if half else hour for hour, _, half in (one.parts, two.parts)]
            same_hour = hours[0] == hours[1] or ("" in (one.parts[2], two.parts[2]) and one.parts[0] == two.parts[0])
            return same_hour and one.parts[1] == two.parts[1]
        if one.kind == two.kind == "mod":
            first, second, modulus = (rational(value) for value in (one.parts[0], *two.parts))
            same = (
                self.answers(one.parts[0], two.parts[0])
                if first is None or second is None or not modulus
                else first % modulus == second % modulus
            )
            return same and self.answers(one.parts[1], two.parts[1])
        ours, theirs = _ratio(one), _ratio(two)
        if not ours or len(ours) != len(theirs):
            return False
        return all(self.answers(("/", a, ours[0]), ("/", b, theirs[0])) for a, b in zip(ours, theirs, strict=True))

    def tagged_and_plain(self, tagged: Tagged, other: Any, ours: bool) -> bool:
        """Compare a ratio with a fraction, a residue with a number, and the digits of a true answer with those of an integer."""
        if isinstance(other, Relation):
            return self.relation(other, tagged, not ours)
        if tagged.kind == "mod":
            residue, modulus, value = map(rational, (*tagged.parts, other))
            if residue is None or modulus is None or value is None:
                return False
            return 0 <= value < modulus and residue % modulus == value
        if tagged.kind == "base" and isinstance(other, Text):
            return not ours and other.words == tagged.parts[:1]
        if not isinstance(other, tuple):
            return False
        if tagged.kind == "base":
            digits, base = tagged.parts
            same_digits = other[0] == "num" and digits.isdecimal() and other[1] == int(digits)
            return same_digits and (base == 10 or not ours)
        parts = _ratio(tagged)
        return len(parts) == 2 and other[0] == "/" and self.answers(("/", *parts), other)

    # --- words

    def choices(self, one: Choice, two: Choice) -> bool:
        return one.letter == two.letter and (None in (one.value, two.value) or self.answers(one.value, two.value))

    def choice(self, choice: Choice, other: Any, ours: bool) -> bool:
        if other in (("sym", choice.letter), Text((choice.letter,)), Text((choice.letter.casefold(),))):
            return True
        return choice.value is not None and self.inner(choice.value, other, ours)

    def texts(self, one: Text, two: Text) -> bool:
        if len({text.words[0] in units.UNITS for text in (one, two) if len(text.words) == 1}) == 2:  # `mg`, `Mg`
            return False
        return [word.casefold() for word in one.words] == [word.casefold() for word in two.words]

    def text(self, text: Text, other: Any, ours: bool) -> bool:
        if isinstance(other, Relation):
            return other.signs == ("=",) and self.answers(other.sides[1], text)
        word = " ".join(text.words)
        if isinstance(other, Group):  # `ABC` is the choices A, B, C
            items = [item[1] if isinstance(item, tuple) and item[0] == "sym" else "?" for item in other.items]
            return word.isupper() and other.joined != "or" and list(word) == sorted(items)
        letters = isinstance(other, tuple) and re.fullmatch("[A-Za-z]{2,4}", word)
        return bool(letters) and self.answers(product(word), other)

    # (type, rule for two values of the type, rule for one and another value; None: the first rule for both)
    _RULES: tuple[tuple[Any, Callable[..., bool], Any], ...] = (
        (Choice, choices, choice), (Tagged, tagged, tagged_and_plain),
        (Cases, cases, None), (Text, texts, text), (Combined | Builder, real_sets, None), (Group, groups, group),
        (Nothing, real_sets, None), (Relation, relations, relation), (Matrix, matrices, lambda *_: False), (Quantity, quantities, None),
    )  # fmt: skip


def same_name(one: str, two: str) -> bool:
    """Return whether two names are equal, or one is `y` and the other a function of x."""
    functions = ("f(x)", "g(x)", "h(x)", "y(x)")
    one, two = plain_name(one), plain_name(two)
    same = one.removesuffix("(x)") == two.removesuffix("(x)")
    return same or (one == "y" and two in functions) or (two == "y" and one in functions)


def plain_name(name: str) -> str:
    return re.sub(r"[\s{}_]|vec|overline|\^", "", name)


def named_parts(value: Any) -> dict[str, Any]:
    """Return the values by name of `x=1, y=2`, `(x,y)=(1,2)` and a system; nothing for other values."""
    pairs: list[tuple[str, Any]] = []
    if isinstance(value, Relation) and value.signs == ("=",):
        name, side = value.names[0], value.sides[-1]
        if name.startswith("(") and isinstance(side, Group):
            keys = re.findall(r"[^(),]+", name)
            pairs = list(zip(keys, side.items, strict=True)) if len(keys) == len(side.items) else []
    elif isinstance(value, Group) and value.opening in ("", "{") and value.joined != "or":
        equations = [item for item in value.items if isinstance(item, Relation) and item.signs == ("=",)]
        pairs = [(item.names[0], item.sides[-1]) for item in equations] if len(equations) == len(value.items) else []
    found = {plain_name(name): side for name, side in pairs if name}
    return found if len(found) == len(pairs) > 1 else {}


def _ratio(value: Any) -> tuple[Any, ...]:
    """Return the parts of a ratio. A time without a half of the day, such as `3:20`, can be one."""
    if isinstance(value, Tagged) and value.kind == "time" and not value.parts[2]:
        return number(value.parts[0]), number(value.parts[1])
    return value.parts if isinstance(value, Tagged) and value.kind == "ratio" else ()


def _function_in_cases(value: Any) -> Cases | None:
    if isinstance(value, Relation) and value.signs == ("=",):
        value = value.sides[1]
    if isinstance(value, tuple) and value[:2] == ("call", "abs") and len(symbols(value[2])) == 1:
        positive, negative = (Relation((value[2], number(0)), (sign,), ("", "")) for sign in (">=", "<"))
        return Cases(((value[2], positive), (("neg", value[2]), negative)))
    return value if isinstance(value, Cases) else None


def _in_order(value: Any) -> Sequence[Any]:
    """Return the values of named ones in the order of the alphabet (`x_2` before `x_10`), else the items of a list."""

    def natural(name: str) -> list[Any]:
        return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"\d+|\D", name)]

    named = named_parts(value)
    return [named[name] for name in sorted(named, key=natural)] if named else value.items


def _is_tuple(group: Group) -> bool:
    """Return whether a list is values in order, in round brackets or without, and no equations or alternatives."""
    brackets = group.opening + group.closing in ("", "()")
    return brackets and group.joined != "or" and not any(isinstance(item, Relation) for item in group.items)


def _alternatives(group: Group) -> bool:
    """Return whether `or` between the items of a list differs from `and`: words, labels, different names."""
    labels = (isinstance(item, tuple) and item[0] == "sym" and item[1].isupper() for item in group.items)
    names = {item.names[0] for item in group.items if isinstance(item, Relation)}
    return any(isinstance(item, Text) for item in group.items) or any(labels) or len(names) > 1


def _mixed_number(group: Group) -> Any:
    """Return the number of `5 and 1/2`, or None for other lists."""
    if group.joined != "and" or len(group.items) != 2:
        return None
    quantity = group.items[1] if isinstance(group.items[1], Quantity) else Quantity(group.items[1])
    whole, fraction = group.items[0], proper(quantity.formula)
    if fraction is None or not isinstance(whole, tuple) or whole[0] != "num" or whole[1].denominator != 1:
        return None
    return replace(quantity, formula=number(whole[1] + fraction))
