r"""Compare two answers by their structure: lists, sets, tuples, intervals, equations, congruences, bases, percentages.

The parts are compared as numbers (`exact`), as texts, and otherwise by a function of two formulas (`expressions`). What
cannot be read as mathematics is compared as text only, so that a number inside it is never taken for the answer.
"""

import re
from collections.abc import Callable, Sequence

from rstar_lab.verify import rules
from rstar_lab.verify.exact import plain_value, values_equal
from rstar_lab.verify.normalise import (
    Element,
    clean,
    key,
    read,
    split_top,
    units_agree,
    with_single_unit,
    words,
)
from rstar_lab.verify.parts import (
    EQUALS,
    GROUPED,
    INEQUALITY,
    PLUS_MINUS,
    UNION,
    as_set,
    ascending,
    bracket_group,
    case_rows,
    choice_letter,
    depth,
    elements,
    has_variables,
    hundredth,
    inequality_name,
    intersection,
    interval_of_unequal,
    is_inequality,
    is_name,
    is_product,
    is_word,
    letters_commute,
    matrix_rows,
    named_value,
    plus_minus,
    same_name,
    sign_may_be_missing,
    strip_membership,
    unwrap,
    without_derivative,
    without_name,
    without_point,
)

MAX_DEPTH = 50  # nested brackets
MAX_WORDS = 4  # of an answer in words, such as `no real solution`

Formulas = Callable[[str, str], bool]

_COMMA = re.compile(",")
_APPROX = re.compile(r"\\approx|\\simeq|≃")
_ANY_RELATION = re.compile(
    r"\\(?:leq|geq|neq|approx|equiv|to|Rightarrow|Leftrightarrow|subset|notin|lor)(?![a-z])|[<>=?]"
)
_OPAQUE = re.compile(r"\\ldots|\\underbrace|\\overbrace|\\begin\{(?:cases|aligned|array|align|\w*matrix)|\?|!!|\\\\|'")
_BASE = re.compile(r"\(?\s*([0-9A-Fa-f]+)\s*\)?\s*_\s*\{?\s*(?:\\text\s*\{)?\s*\(?(\d+|[a-z]+)\)?\s*\}?\}?")
_CONGRUENCE = re.compile(
    r"^(?:.*?(?:\\equiv|=)\s*)?(.+?)\s*\(?\s*(?:\\pmod\s*\{?|\\(?:b?mod)\s*|\\text\{\s*\(?mod\s*\}\s*|\\?(?<![A-Za-z])mod\s*)\s*\{?\s*(\d+)\s*\}?\s*\)?$"
)
_TIME = re.compile(r"(\d{1,2}):(\d\d)\s*(?:\\text\{)?\s*(?:([ap])\.?\s*m\.?)?\s*\}?", re.IGNORECASE)
_RATIO = re.compile(r"\s*[^:,()\[\]]+(?::[^:,()\[\]]+)+")
_REMAINDER = re.compile(r"(\d+)\s*(?:\\text\{)?\s*[Rr](?:emainder)?\s*\}?\s*(\d+)")
_LETTERS = re.compile(r"[A-Za-z]{2,}|\([A-Za-z]\)|\\text\{[^{}]*\}|(?:[A-Za-z]\s*)+")
_CHOICE = re.compile(
    r"^(?:\\text\{\s*\(?([A-E])\)?\s*\}|\(([A-E])\)|([A-E])(?=[:.)]\s))\s*[:.)]?\s*(?![,;&]|\(?[A-E]\)?$|.*\([A-E]\))(?=\S)(.+)$"
)
_OR = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\lor(?![a-z])|或", re.IGNORECASE)
_MIXED = re.compile(r"^([+-]?\d+)\s*,\s*(?:(\d{1,9})/(\d{1,9})|\\frac\{(\d{1,9})\}\{(\d{1,9})\})(?=\D*$)", re.ASCII)
_DEGREE_ARC = re.compile(r"\\circ\s*\}?\s*\d+\s*(?:'|\^\{\\prime)")
_CASES = re.compile(
    r"^(?:([A-Za-z]\w*\s*(?:\([^()]*\))?)\s*=\s*)?(?:\\\{)?\s*\\begin\{(cases|aligned|array|matrix|align)\}(.*?)\\end\{\2\}$",
    re.DOTALL,
)


def _name_first(chain: list[str]) -> list[str]:
    """Return `value = name` as [name, value]; other parts as they are."""
    return chain[::-1] if len(chain) == 2 and is_name(chain[1]) and not is_name(chain[0]) else chain


def equal(candidate: str, answer: str, formulas: Formulas) -> bool:
    """Return whether two answers are equal. formulas: compares two formulas that are not plain numbers."""
    first, second = _cleaned(candidate, answer)
    return not _one_is_an_alternative(candidate, answer, first, second) and _Comparison(formulas).answers(first, second)


def _cleaned(candidate: str, answer: str) -> tuple[str, str]:
    """Return both answers in normalised LaTeX. `5 and 1/2` is a mixed number if the other answer is no list."""
    first, second = clean(candidate), clean(answer)
    if "and" in candidate and "," not in second:
        first = _MIXED.sub(_mixed, first)
    if "and" in answer and "," not in first:
        second = _MIXED.sub(_mixed, second)
    return first, second


def _mixed(match: re.Match[str]) -> str:
    whole, above, below = match[1], match[2] or match[4], match[3] or match[5]
    return rf"{whole}\frac{{{above}}}{{{below}}}" if int(above) < int(below) else match[0]


def _one_is_an_alternative(candidate: str, answer: str, first: str, second: str) -> bool:
    """Return whether only one of two answers joins words, equations in different names or conditions that overlap by `or`.

    Between numbers, `or`, `and` and a comma mean the same: a list.
    """
    if bool(_OR.search(candidate)) == bool(_OR.search(answer)):
        return False
    return any(
        any(read(part).prose or is_word(part) or re.fullmatch("[A-Z]", part) for part in parts)
        or intersection(parts) is not None
        or len({chain[0].strip() for part in parts if len(chain := split_top(part, EQUALS)) == 2}) > 1
        for parts in (elements(first), elements(second))
    )


def readable(answer: str, is_formula: Callable[[str], bool]) -> bool:
    """Return whether an answer is read as mathematics or as a few words, not compared as text only.

    is_formula: whether a text without relations and outer brackets is a formula.
    """
    text = unwrap(clean(answer))
    if any(pattern.fullmatch(text) for pattern in (_BASE, _TIME, _RATIO, _REMAINDER)) or _CONGRUENCE.match(text):
        return True
    if rows := matrix_rows(text):
        return all(_element_readable(cell, is_formula) for row in rows for cell in row)
    if _OPAQUE.search(text):
        return r"\begin{cases}" in text
    return bool(text) and all(_element_readable(part, is_formula) for part in elements(text))


def _element_readable(text: str, is_formula: Callable[[str], bool]) -> bool:
    element = read(text)
    value = strip_membership(element.text)
    if element.prose or is_word(value):
        return len(value.split()) <= MAX_WORDS and not re.search(r"\d", value)
    if plain_value(value) is not None:
        return True
    if group := bracket_group(value):
        return all(_element_readable(part, is_formula) for part in elements(group[1]))
    if PLUS_MINUS.search(value):
        return all(_element_readable(part, is_formula) for part in plus_minus(value))
    for separator in (EQUALS, _APPROX, INEQUALITY, UNION):
        parts = split_top(value, separator)
        if len(parts) > 1:
            return all(not part.strip() or is_name(part) or _element_readable(part, is_formula) for part in parts)
    return is_formula(value)


def quick(candidate: str, answer: str) -> bool | None:
    """Return `equal` if texts and plain numbers decide, else None."""
    first, second = _cleaned(candidate, answer)
    if not first or not second or _one_is_an_alternative(candidate, answer, first, second):
        return False
    if key(first) == key(second):
        return True
    one, two = read(first), read(second)
    if one.percent or two.percent:
        return None
    left, right = plain_value(one.text), plain_value(two.text)
    if left is None or right is None or "," in one.text + two.text:
        return None
    return units_agree(one, two) and values_equal(left, right)


class _Comparison:
    def __init__(self, formulas: Formulas) -> None:
        self.formulas = formulas

    # --- a complete answer ---------------------------------------------------------------------------------------

    def answers(self, first: str, second: str) -> bool:
        if not first or not second:
            return False
        if key(first) == key(second):
            return True
        if max(depth(first), depth(second)) > MAX_DEPTH:
            return False
        first, second = unwrap(first), unwrap(second)
        choice, choice_answer = _CHOICE.match(first), _CHOICE.match(second)
        if choice and not choice_answer:
            return words(second) == choice_letter(choice) or self.answers(choice[4].strip(), second)
        if choice and choice_answer:
            return choice_letter(choice) == choice_letter(choice_answer) and self.answers(choice[4], choice_answer[4])
        if choice_answer:
            return words(first) == choice_letter(choice_answer) or self.answers(first, choice_answer[4].strip())
        first, second = without_derivative(first, second), without_derivative(second, first)
        if (cases := self.cases(_CASES.match(first), _CASES.match(second), first, second)) is not None:
            return cases
        if _OPAQUE.search(first) or _OPAQUE.search(second):
            return self.opaque(first, second)
        if (known := self.special(first, second)) is not None:
            return known
        ours, theirs = elements(first), elements(second)
        if len(ours) != len(theirs):
            ours, theirs = ([value for part in parts for value in plus_minus(part)] for parts in (ours, theirs))
        if len(ours) == len(theirs) == 1:
            return self.element(ours[0], theirs[0])
        if min(len(ours), len(theirs)) == 1:
            return self.one_and_several(ours, theirs)
        return self.lists(ours, theirs)

    def cases(self, ours: re.Match[str] | None, theirs: re.Match[str] | None, first: str, second: str) -> bool | None:
        """Compare functions in cases, row by row, and systems of equations with lists; None for other answers."""
        rows, rows_answer = (case_rows(match) if match else None for match in (ours, theirs))
        if ours and theirs and rows and rows_answer:
            if len(rows) != len(rows_answer) or {len(row) for row in (*rows, *rows_answer)} != {2}:
                return None if {len(row) for row in (*rows, *rows_answer)} != {1} else self.system(rows, rows_answer)
            if ours[1] and theirs[1] and key(ours[1]) != key(theirs[1]):
                return False
            left = list(rows_answer)
            for row in rows:
                match = next((other for other in left if all(map(self.element, row, other))), None)
                if match is None:
                    return False
                left.remove(match)
            return True
        for one, other in ((rows, second), (rows_answer, first)):
            if one and {len(row) for row in one} == {1} and not _OPAQUE.search(other):
                equations = ", ".join(row[0] for row in one)
                return self.answers(equations, other) if one is rows else self.answers(other, equations)
        return None

    def system(self, first: Sequence[Sequence[str]], second: Sequence[Sequence[str]]) -> bool:
        return self.lists([row[0] for row in first], [row[0] for row in second])

    def opaque(self, first: str, second: str) -> bool:
        lists = [[part.strip() for part in split_top(text, _COMMA)] for text in (first, second)]
        if len(lists[0]) == len(lists[1]) > 1 and all(map(matrix_rows, (*lists[0], *lists[1]))):
            return self.lists(*lists)
        names = [
            parts[0] for text in (first, second) if is_name((parts := split_top(text, EQUALS))[0]) and len(parts) == 2
        ]
        if len(names) < 2 or same_name(*names):
            first, second = named_value(first), named_value(second)
        matrix, matrix_answer = matrix_rows(first), matrix_rows(second)
        if matrix and matrix_answer and not re.search(r"\\ldots|\?|\\underbrace", first + second):
            return [len(row) for row in matrix] == [len(row) for row in matrix_answer] and all(
                self.element(a, b)
                for ours, theirs in zip(matrix, matrix_answer, strict=True)
                for a, b in zip(ours, theirs, strict=True)
            )
        return bool(_LETTERS.fullmatch(first)) and words(first) == words(second)

    def special(self, first: str, second: str) -> bool | None:
        """Compare notations whose symbols do not have their usual meaning; None if neither answer has one."""
        bases = [_BASE.fullmatch(re.sub(r"\\text\{\s*([A-F]+)\s*\}", r"\1", text)) for text in (first, second)]
        if any(bases):
            digits = [match[1] if match else text.strip() for match, text in zip(bases, (first, second), strict=True)]
            given = [rules.NUMBER_WORDS.get(match[2], match[2]) for match in bases if match]
            named = [match for match in bases if match and (match[2].isdigit() or match[2] in rules.NUMBER_WORDS)]
            if named and any(match[2] == "16" or any(char.isdigit() for char in match[1]) for match in named):
                same_base = len(set(given)) == 1 and (bases[1] is not None or given == ["10"])
                return same_base and digits[0].lower().lstrip("0") == digits[1].lower().lstrip("0")
        congruences = [_CONGRUENCE.match(text) for text in (first, second)]
        if any(congruences):
            return self.congruences(congruences, (first, second))
        times = [_TIME.fullmatch(text) for text in (first, second)]
        if all(times):
            ours, theirs = ((int(match[1]), match[2], (match[3] or "").lower()) for match in times if match)
            return ours[:2] == theirs[:2] and (ours[2] == theirs[2] or not ours[2] or not theirs[2])
        remainders = [_REMAINDER.fullmatch(text) for text in (first, second)]
        if any(remainders):
            return all(remainders) and len({match.groups() for match in remainders if match}) == 1
        if all(_RATIO.fullmatch(text) and not _ANY_RELATION.search(text) for text in (first, second)):
            return self.ratios(first.split(":"), second.split(":"))
        if _DEGREE_ARC.search(first) or _DEGREE_ARC.search(second):
            return False
        return None

    def congruences(self, matches: Sequence[re.Match[str] | None], texts: Sequence[str]) -> bool:
        moduli = {match[2] for match in matches if match}
        if len(moduli) != 1:
            return False
        modulus = int(moduli.pop())
        sides = [match[1] if match else text for match, text in zip(matches, texts, strict=True)]
        residues = [[plain_value(part) for part in elements(side)] for side in sides]
        if not modulus or any(value is None for side in residues for value in side):
            return key(sides[0]) == key(sides[1])
        numbers = [[value.number for value in side if value] for side in residues]
        if not all(matches) and any(not 0 <= number < modulus for side in numbers for number in side):
            return False  # `36 mod 5` is 1
        if all(matches):
            numbers = [[number % modulus for number in side] for side in numbers]
        return sorted(numbers[0]) == sorted(numbers[1])

    def ratios(self, first: Sequence[str], second: Sequence[str]) -> bool:
        if len(first) != len(second):
            return False
        return all(
            self.element(rf"\frac{{{a}}}{{{first[0]}}}", rf"\frac{{{b}}}{{{second[0]}}}")
            for a, b in zip(first[1:], second[1:], strict=True)
        )

    # --- lists ---------------------------------------------------------------------------------------------------

    def lists(self, first: Sequence[str], second: Sequence[str]) -> bool:
        if len(first) != len(second):
            return False
        if len(first) > 40:
            return all(self.element(a, b) for a, b in zip(first, second, strict=True))
        left = list(range(len(second)))
        for place, ours in enumerate(first):
            order = sorted(left, key=lambda index: (key(second[index]) != key(ours), index != place, index))
            for index in order:
                if self.element(ours, second[index]):
                    left.remove(index)
                    break
            else:
                return False
        return True

    def one_and_several(self, first: Sequence[str], second: Sequence[str]) -> bool:
        one, several = (first[0], second) if len(first) == 1 else (second[0], first)
        one = named_value(strip_membership(one))
        if GROUPED.fullmatch(one.strip()) and one.count(",") + 1 == len(several):
            return self.lists(one.split(","), several)  # `100,200` can be a number or a list
        group = bracket_group(one)
        if group:
            left, inner, right = group
            items = elements(inner)
            if (left, right) == ("{", "}") or ((left, right) == ("[", "]") and len(items) > 2):
                return self.lists(items, several)
            if left == "(" and right == ")" and len(items) == len(several):
                return all(self.element(named_value(a), named_value(b)) for a, b in zip(items, several, strict=True))
        if (both := intersection(several)) is not None:
            return self.element(one, both)
        unions = [as_set(text) for text in several]
        if all(unions) and len(several) > 1:
            return self.element(one, r"\cup ".join(text for text in unions if text))
        return False

    # --- one element ---------------------------------------------------------------------------------------------

    def element(self, candidate: str, answer: str) -> bool:
        if key(candidate) == key(answer):
            return True
        first, second = read(candidate), read(answer)
        letter = (r"\s" if not second.unit else "") + r"[A-Za-z](?:\^\{\d\})?$"
        if second.text and not has_variables(named_value(second.text)) and re.search(letter, first.text):
            first = with_single_unit(first)
        elif plain_value(named_value(first.text)) is not None and first.unit:
            second = with_single_unit(second)
        if not units_agree(first, second):
            return False
        if not first.text or not second.text:
            return False
        if first.percent and second.percent:
            return self.values(first, second)
        if first.percent:
            return (sign_may_be_missing(first) and self.values(first, second)) or self.values(hundredth(first), second)
        if second.percent:
            return (sign_may_be_missing(second) and self.values(first, second)) or self.values(first, hundredth(second))
        return self.values(first, second)

    def values(self, first: Element, second: Element) -> bool:
        ours, theirs = first.text, second.text
        if key(ours) == key(theirs):
            return True
        if matrix_rows(ours) and matrix_rows(theirs):
            return self.opaque(ours, theirs)
        if ("=" in ours) != ("=" in theirs):
            ours, theirs = without_name(ours, theirs), without_name(theirs, ours)
            first, second = read(ours), read(theirs)
        if (
            first.prose
            or second.prose
            or ((is_word(ours) or is_word(theirs)) and not (is_product(ours) or is_product(theirs)))
        ):
            return words(ours) == words(theirs) or letters_commute(ours, theirs)
        left, right = plain_value(ours), plain_value(theirs)
        if left is not None and right is not None:
            return values_equal(left, right)
        ours, theirs = interval_of_unequal(strip_membership(ours), strip_membership(theirs))
        if PLUS_MINUS.search(ours) or PLUS_MINUS.search(theirs):
            mine, truth = plus_minus(ours), plus_minus(theirs)
            return self.lists(mine, truth)
        return self.relations(ours, theirs)

    def relations(self, first: str, second: str) -> bool:
        chains = [_name_first(split_top(text, EQUALS)) for text in (first, second)]
        approximate = [split_top(text, _APPROX) for text in (first, second)]
        if len(approximate[0]) == 2 and len(approximate[1]) == 1:
            return self.approximation(approximate[0], second)
        if len(approximate[1]) == 2 and len(approximate[0]) == 1:
            return self.approximation(approximate[1], first)
        if len(chains[0]) > 1 and len(chains[1]) == 1:
            return self.chain(chains[0], second)
        if len(chains[1]) > 1 and len(chains[0]) == 1:
            return is_name(chains[1][0]) and self.chain(chains[1], first)
        if len(chains[0]) > 1:
            return self.equations(chains[0], chains[1])
        if INEQUALITY.search(first) or INEQUALITY.search(second):
            return self.inequalities(first, second)
        return self.groups(first, second)

    def approximation(self, parts: Sequence[str], other: str) -> bool:
        exact, rounded = read(parts[0].strip()).text, plain_value(parts[1])
        left = plain_value(exact)
        if left is not None and rounded is not None and round(left.number, rounded.decimals) != rounded.number:
            return False
        if "=" in exact or not exact:
            return False
        return self.relations(exact, other) or (rounded is not None and self.relations(parts[1].strip(), other))

    def chain(self, chain: Sequence[str], value: str) -> bool:
        """Compare `name = ... = last` with a value. Every other part that has no letter must equal the last one."""
        last = chain[-1].strip()
        for part in chain[:-1]:
            if is_name(part):
                continue
            if part is chain[0] and has_variables(part):
                if len(chain) == 2 and not has_variables(value):  # an equation is not its right side
                    return False
            elif not self.element(part.strip(), last):
                return False
        return self.element(last, value)

    def equations(self, first: Sequence[str], second: Sequence[str]) -> bool:
        if all(is_name(chain[0]) for chain in (first, second)):
            if same_name(first[0].strip(), second[0].strip()) and all(map(self.consistent, (first, second))):
                return self.element(first[-1].strip(), second[-1].strip())
            if len(first) > 2 or len(second) > 2:
                return len(first) == len(second) and all(map(self.element, first, second))
        if len(first) != 2 or len(second) != 2:
            return len(first) == len(second) and all(map(self.element, first, second))
        return self.formulas("=".join(first), "=".join(second))

    def consistent(self, chain: Sequence[str]) -> bool:
        """Return whether the parts of `name = part = ... = last` are equal to each other."""
        return all(self.element(part.strip(), chain[-1].strip()) for part in chain[1:-1])

    def inequalities(self, first: str, second: str) -> bool:
        if is_inequality(first) and is_inequality(second):
            ours, theirs = ascending(first), ascending(second)
            if ours[1::2] == theirs[1::2] and all(map(self.element, ours[::2], theirs[::2])):
                return True
            if inequality_name(first) != inequality_name(second):
                return len(ours) == len(theirs) == 3 and self.formulas("".join(ours), "".join(theirs))
        sets = [as_set(text) for text in (first, second)]
        if all(sets):
            return self.element(str(sets[0]), str(sets[1]))
        if is_inequality(first) and is_inequality(second):
            ours, theirs = ascending(first), ascending(second)
            return len(ours) == len(theirs) == 3 and self.formulas("".join(ours), "".join(theirs))
        return False

    def groups(self, first: str, second: str) -> bool:
        """Compare texts without relation: sets, tuples, intervals and formulas."""
        unions = [split_top(text, UNION) for text in (first, second)]
        if max(map(len, unions)) > 1:
            if len(unions[0]) == len(unions[1]) and self.lists(*unions):
                return True
            return self.formulas(first, second)
        ours, theirs = (bracket_group(without_point(*pair)) for pair in ((first, second), (second, first)))
        if ours and theirs:
            items, items_answer = elements(ours[1]), elements(theirs[1])
            if (
                ours[0] != theirs[0]
                and len((items, items_answer)[theirs[0] == "{"]) == 1
                and "{" in (ours[0], theirs[0])
            ):
                return self.element(items[0], second) if ours[0] == "{" else self.element(first, items_answer[0])
            if len(items) == len(items_answer) > 1 or "{" in (ours[0], theirs[0]):
                if ours[0] == theirs[0] == "{":
                    return self.lists(items, items_answer)
                if (ours[0], ours[2]) != (theirs[0], theirs[2]):
                    return False
                return all(
                    self.element(named_value(a), named_value(b)) for a, b in zip(items, items_answer, strict=True)
                )
            if len(items) != len(items_answer):
                return False
        elif (ours or theirs) and (group := ours or theirs):
            items = elements(group[1])
            if group[0] == "{":
                if len(items) == 1 and items[0] != r"\emptyset":
                    return self.element(items[0], second if ours else first)
                return False if r"\mathbb" not in first + second else self.formulas(first, second)
            if len(items) == 1 and group[0] == "(":
                return self.element(group[1], second) if ours else self.element(first, group[1])
        if any(len(split_top(text, _ANY_RELATION)) > 1 for text in (first, second)):
            return False
        return self.formulas(first, second)
