r"""Compare two answers by their structure: lists, sets, tuples, intervals, equations, congruences, bases, percentages.

The parts are compared as numbers (`exact`), as texts, and otherwise by a function of two formulas (`expressions`). What
cannot be read as mathematics is compared as text only, so that a number inside it is never taken for the answer.
"""

import re
from collections.abc import Callable, Sequence
from itertools import accumulate

from rstar_lab.verify import rules
from rstar_lab.verify.exact import plain_value, values_equal
from rstar_lab.verify.normalise import (
    Element,
    clean,
    group_end,
    key,
    read,
    split_top,
    units_agree,
    with_single_unit,
    words,
)

MAX_DEPTH = 50  # nested brackets
MAX_WORDS = 4  # of an answer in words, such as `no real solution`

Formulas = Callable[[str, str], bool]

_LIST = re.compile(r"[,;]|\\\\")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_APPROX = re.compile(r"\\approx|\\simeq|≃")
_INEQUALITY = re.compile(r"\\leq(?![a-z])|\\geq(?![a-z])|<=|>=|<|>")
_ANY_RELATION = re.compile(
    r"\\(?:leq|geq|neq|approx|equiv|to|Rightarrow|Leftrightarrow|subset|notin|lor)(?![a-z])|[<>=?]"
)
_UNION = re.compile(r"\\cup(?![a-z])")
_PLUS_MINUS = re.compile(r"\\pm(?![a-z])")
_OPAQUE = re.compile(r"\\ldots|\\underbrace|\\overbrace|\\begin\{(?:cases|aligned|array|align)|\?|!!|\\\\|'")
_NAME = re.compile(
    r"(?:\\(?:angle|triangle|operatorname|text|overline|vec|bar|hat|mathbb|mathcal)\s*)?[\\A-Za-z|{}\s]*"
    r"(?:_\{[^{}]*\}|'|\\prime)*(?:\s*\([^()+*/<>=]*\))?(?:\^\{(?:-1|\\prime)\})?"
)
_TUPLE_NAME = re.compile(r"\(\s*\w+(?:_\{\w+\})?(?:\s*,\s*\w+(?:_\{\w+\})?)*\s*\)")
_MEMBER = re.compile(
    r"^\s*(\\?[A-Za-z]+(?:_\{\w+\})?)\s*\\in\s+(?=\S)|^\s*(\\?[A-Za-z]+(?:_\{\w+\})?)\s*\\in(?=[\[({\\\]])"
)
_BUILDER = re.compile(r"^\\\{\s*(\\?[A-Za-z]+)\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:|\\\|)\s*(.+?)\s*\\\}$")
_BASE = re.compile(r"\(?\s*([0-9A-Fa-f]+)\s*\)?\s*_\s*\{?\s*(?:\\text\s*\{)?\s*(\d+|[a-z]+)\s*\}?\}?")
_CONGRUENCE = re.compile(
    r"^(?:.*?\\equiv\s*)?(.+?)\s*\(?\s*(?:\\pmod\s*\{?|\\(?:b?mod)\s*|\\text\{\s*\(?mod\s*\}\s*|\\?(?<![A-Za-z])mod\s*)\s*\{?\s*(\d+)\s*\}?\s*\)?$"
)
_TIME = re.compile(r"(\d{1,2}):(\d\d)\s*(?:\\text\{)?\s*(?:([ap])\.?\s*m\.?)?\s*\}?", re.IGNORECASE)
_RATIO = re.compile(r"\s*[^:,()\[\]]+(?::[^:,()\[\]]+)+")
_REMAINDER = re.compile(r"(\d+)\s*(?:R|r|\\text\{\s*[Rr](?:emainder)?\s*\})\s*(\d+)")
_LETTERS = re.compile(r"[A-Za-z]{2,}|\([A-Za-z]\)|\\text\{[^{}]*\}|(?:[A-Za-z]\s*)+")
_CHOICE = re.compile(r"^(?:\\text\{\s*\(?([A-E])\)?\s*\}|\(([A-E])\))\s*:?\s*(?![,;&])(?=\S)(.+)$")
_DEGREE_ARC = re.compile(r"\\circ\s*\}?\s*\d+\s*(?:'|\^\{\\prime)")
_MATRIX = re.compile(
    r"^\(?\s*[\[(]?\s*\\begin\{([pbB]?matrix|array)\}(.*?)(?:\\\\)?\s*\\end\{\1\}\s*[\])]?\s*\)?$", re.DOTALL
)
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+")


def equal(candidate: str, answer: str, formulas: Formulas) -> bool:
    """Return whether two answers are equal. formulas: compares two formulas that are not plain numbers."""
    return _Comparison(formulas).answers(clean(candidate), clean(answer))


def readable(answer: str, is_formula: Callable[[str], bool]) -> bool:
    """Return whether an answer is read as mathematics or as a few words, not compared as text only.

    is_formula: whether a text without relations and outer brackets is a formula.
    """
    text = _unwrap(clean(answer))
    if any(pattern.fullmatch(text) for pattern in (_BASE, _TIME, _RATIO, _REMAINDER)) or _CONGRUENCE.match(text):
        return True
    if rows := _rows(text):
        return all(_element_readable(cell, is_formula) for row in rows for cell in row)
    if _OPAQUE.search(text):
        return r"\begin{cases}" in text
    return bool(text) and all(_element_readable(part, is_formula) for part in _elements(text))


def _element_readable(text: str, is_formula: Callable[[str], bool]) -> bool:
    element = read(text)
    value = _strip_membership(element.text)
    if element.prose or _is_word(value):
        return len(value.split()) <= MAX_WORDS and not re.search(r"\d", value)
    if plain_value(value) is not None:
        return True
    if bracketed := _bracketed(value):
        return all(_element_readable(part, is_formula) for part in _elements(bracketed[1]))
    if _PLUS_MINUS.search(value):
        return all(_element_readable(part, is_formula) for part in _plus_minus(value))
    for separator in (_EQUALS, _APPROX, _INEQUALITY, _UNION):
        parts = split_top(value, separator)
        if len(parts) > 1:
            return all(not part.strip() or _is_name(part) or _element_readable(part, is_formula) for part in parts)
    return is_formula(value)


def quick(candidate: str, answer: str) -> bool | None:
    """Return `equal` if texts and plain numbers decide, else None."""
    first, second = clean(candidate), clean(answer)
    if not first or not second:
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
        if max(_depth(first), _depth(second)) > MAX_DEPTH:
            return False
        first, second = _unwrap(first), _unwrap(second)
        choice, choice_answer = _CHOICE.match(first), _CHOICE.match(second)
        if choice and not choice_answer and _CHOICE.match("(A) " + second) is not None:
            letter = choice[1] or choice[2]
            return words(second) == letter.casefold() or self.answers(choice[3].strip(), second)
        if choice and choice_answer:
            same = (choice[1] or choice[2]) == (choice_answer[1] or choice_answer[2])
            return same and self.answers(choice[3].strip(), choice_answer[3].strip())
        if choice_answer:
            letter = choice_answer[1] or choice_answer[2]
            return words(first) == letter.casefold() or self.answers(first, choice_answer[3].strip())
        if _OPAQUE.search(first) or _OPAQUE.search(second):
            return self.opaque(first, second)
        if (known := self.special(first, second)) is not None:
            return known
        ours, theirs = _elements(first), _elements(second)
        if len(ours) != len(theirs):
            ours, theirs = ([value for part in parts for value in _plus_minus(part)] for parts in (ours, theirs))
        if len(ours) == len(theirs) == 1:
            return self.element(ours[0], theirs[0])
        if min(len(ours), len(theirs)) == 1:
            return self.one_and_several(ours, theirs)
        return self.lists(ours, theirs)

    def opaque(self, first: str, second: str) -> bool:
        matrix, matrix_answer = _rows(first), _rows(second)
        if matrix and matrix_answer and not re.search(r"\\ldots|\?|\\underbrace", first + second):
            return [len(row) for row in matrix] == [len(row) for row in matrix_answer] and all(
                self.element(a, b)
                for ours, theirs in zip(matrix, matrix_answer, strict=True)
                for a, b in zip(ours, theirs, strict=True)
            )
        return bool(_LETTERS.fullmatch(first)) and words(first) == words(second)

    def special(self, first: str, second: str) -> bool | None:
        """Compare notations whose symbols do not have their usual meaning; None if neither answer has one."""
        bases = [_BASE.fullmatch(text) for text in (first, second)]
        if any(bases):
            digits = [match[1] if match else text.strip() for match, text in zip(bases, (first, second), strict=True)]
            given = [rules.NUMBER_WORDS.get(match[2], match[2]) for match in bases if match]
            named = [match for match in bases if match and (match[2].isdigit() or match[2] in rules.NUMBER_WORDS)]
            if named and any(any(char.isdigit() for char in match[1]) for match in named):
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
        residues = [[plain_value(part) for part in _elements(side)] for side in sides]
        if not modulus or any(value is None for side in residues for value in side):
            return key(sides[0]) == key(sides[1])
        numbers = [[value.number for value in side if value] for side in residues]
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
        one = _strip_membership(one)
        if _GROUPED.fullmatch(one.strip()) and one.count(",") + 1 == len(several):
            return self.lists(one.split(","), several)  # `100,200` can be a number or a list
        bracketed = _bracketed(one)
        if bracketed:
            left, inner, right = bracketed
            items = _elements(inner)
            if left == "{" and right == "}":
                return self.lists(items, several)
            if left == "(" and right == ")" and len(items) == len(several):
                return all(self.element(_value(a), _value(b)) for a, b in zip(items, several, strict=True))
        unions = [_as_set(text) for text in several]
        if all(unions) and len(several) > 1:
            return self.element(one, r"\cup ".join(text for text in unions if text))
        return False

    # --- one element ---------------------------------------------------------------------------------------------

    def element(self, candidate: str, answer: str) -> bool:
        if key(candidate) == key(answer):
            return True
        first, second = read(candidate), read(answer)
        if plain_value(second.text) is not None and re.search(
            r"\s[A-Za-z]$" if not second.unit else "[A-Za-z]$", first.text
        ):
            first = with_single_unit(first)
        elif plain_value(first.text) is not None and first.unit:
            second = with_single_unit(second)
        if not units_agree(first, second):
            return False
        if not first.text or not second.text:
            return False
        if first.percent and second.percent:
            return self.values(first, second)
        if first.percent:
            return self.values(first, second) or self.values(_hundredth(first), second)
        if second.percent:
            return self.values(first, second) or self.values(first, _hundredth(second))
        return self.values(first, second)

    def values(self, first: Element, second: Element) -> bool:
        ours, theirs = first.text, second.text
        if key(ours) == key(theirs):
            return True
        if ("=" in ours) != ("=" in theirs):
            ours, theirs = _without_name(ours), _without_name(theirs)
            first, second = read(ours), read(theirs)
        if (
            first.prose
            or second.prose
            or ((_is_word(ours) or _is_word(theirs)) and not (_is_product(ours) or _is_product(theirs)))
        ):
            return words(ours) == words(theirs) or _letters_commute(ours, theirs)
        left, right = plain_value(ours), plain_value(theirs)
        if left is not None and right is not None:
            return values_equal(left, right)
        ours, theirs = _strip_membership(ours), _strip_membership(theirs)
        if _PLUS_MINUS.search(ours) or _PLUS_MINUS.search(theirs):
            mine, truth = _plus_minus(ours), _plus_minus(theirs)
            return self.lists(mine, truth)
        return self.relations(ours, theirs)

    def relations(self, first: str, second: str) -> bool:
        chains = [split_top(text, _EQUALS) for text in (first, second)]
        approximate = [split_top(text, _APPROX) for text in (first, second)]
        if len(approximate[0]) == 2 and len(approximate[1]) == 1:
            return self.approximation(approximate[0], second)
        if len(approximate[1]) == 2 and len(approximate[0]) == 1:
            return self.approximation(approximate[1], first)
        if len(chains[0]) > 1 and len(chains[1]) == 1:
            return self.chain(chains[0], second)
        if len(chains[1]) > 1 and len(chains[0]) == 1:
            return _is_name(chains[1][0]) and self.chain(chains[1], first)
        if len(chains[0]) > 1:
            return self.equations(chains[0], chains[1])
        if _INEQUALITY.search(first) or _INEQUALITY.search(second):
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
            if _is_name(part):
                continue
            if part is chain[0] and _has_variables(part):
                if len(chain) == 2 and not _has_variables(value):  # an equation is not its right side
                    return False
            elif not self.element(part.strip(), last):
                return False
        return self.element(last, value)

    def equations(self, first: Sequence[str], second: Sequence[str]) -> bool:
        if all(_is_name(chain[0]) for chain in (first, second)):
            if words(first[0]) == words(second[0]) and all(map(self.consistent, (first, second))):
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
        if _is_inequality(first) and _is_inequality(second):
            ours, theirs = _ascending(first), _ascending(second)
            if ours[1::2] == theirs[1::2] and all(map(self.element, ours[::2], theirs[::2])):
                return True
            if _inequality_name(first) != _inequality_name(second):
                return len(ours) == len(theirs) == 3 and self.formulas("".join(ours), "".join(theirs))
        sets = [_as_set(text) for text in (first, second)]
        if all(sets):
            return self.element(str(sets[0]), str(sets[1]))
        if _is_inequality(first) and _is_inequality(second):
            ours, theirs = _ascending(first), _ascending(second)
            return len(ours) == len(theirs) == 3 and self.formulas("".join(ours), "".join(theirs))
        return False

    def groups(self, first: str, second: str) -> bool:
        """Compare texts without relation: sets, tuples, intervals and formulas."""
        unions = [split_top(text, _UNION) for text in (first, second)]
        if max(map(len, unions)) > 1:
            if len(unions[0]) == len(unions[1]) and self.lists(*unions):
                return True
            return self.formulas(first, second)
        ours, theirs = _bracketed(first), _bracketed(second)
        if ours and theirs:
            items, items_answer = _elements(ours[1]), _elements(theirs[1])
            if len(items) == len(items_answer) > 1 or "{" in (ours[0], theirs[0]):
                if ours[0] == theirs[0] == "{":
                    return self.lists(items, items_answer)
                if (ours[0], ours[2]) != (theirs[0], theirs[2]):
                    return False
                return all(self.element(_value(a), _value(b)) for a, b in zip(items, items_answer, strict=True))
            if len(items) != len(items_answer):
                return False
        elif (ours or theirs) and (group := ours or theirs):
            items = _elements(group[1])
            if group[0] == "{":
                if len(items) == 1:
                    return self.element(items[0], second if ours else first)
                return False if r"\mathbb" not in first + second else self.formulas(first, second)
            if len(items) == 1 and group[0] == "(":
                return self.element(group[1], second) if ours else self.element(first, group[1])
        if any(len(split_top(text, _ANY_RELATION)) > 1 for text in (first, second)):
            return False
        return self.formulas(first, second)


# --- reading parts ---------------------------------------------------------------------------------------------------


def _has_variables(text: str) -> bool:
    return bool(re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)))


def _depth(text: str) -> int:
    """Return how deep the brackets of a text are nested."""
    return max(accumulate((char in "([{") - (char in ")]}") for char in text), default=0)


def _unwrap(text: str) -> str:
    if (match := re.fullmatch(r"\{(.*)\}", text)) and group_end(text, 0) == len(text):
        return _unwrap(match[1].strip())
    match = re.fullmatch(r"\]\s*([^\[\]]+)\s*\[", text)  # French: ]1,2[
    return f"({match[1]})" if match else text


def _elements(text: str) -> list[str]:
    if _GROUPED.fullmatch(text.strip().lstrip("+-＄ ")):
        return [text]
    text = re.sub(
        r"(?<![\d,])(\d{1,3}(?:,\d{3})+(?:\.\d+)?)(?=\s*(?:$|\\text|[A-Za-z%＄\\]))",
        lambda m: m[1].replace(",", ""),
        text,
    )
    return [part for part in (part.strip() for part in split_top(text, _LIST)) if part]


def _hundredth(element: Element) -> Element:
    value = plain_value(element.text)
    if value is not None:
        number = value.number / 100
        return Element(rf"\frac{{{number.numerator}}}{{{number.denominator}}}")
    return Element(rf"\frac{{{element.text}}}{{100}}", prose=element.prose)


def _value(text: str) -> str:
    """Return the value of `name = value`, or the text."""
    parts = split_top(text, _EQUALS)
    return parts[1].strip() if len(parts) == 2 and _is_name(parts[0]) else text


def _without_name(text: str) -> str:
    r"""Return the value of `name = value` if the name contains a word, such as `\text{Re}(z) = 1`; else the text."""
    return _value(text) if read(text).prose else text


def _is_name(text: str) -> bool:
    text = text.strip()
    if _TUPLE_NAME.fullmatch(text):
        return True
    plain = re.sub(r"^\\text\{[^{}]*\}\s*(?:\(\s*[A-Za-z]\s*\))?", "", text)
    return (
        bool(text)
        and (
            not plain
            or bool(_NAME.fullmatch(plain))
            or bool(re.fullmatch(r"[A-Za-z]+\s*(?:\([^()]*\)|\[[^\[\]]*\])", plain))
        )
        and not re.search(r"\\(?:frac|sqrt|sin|cos|pi|ln|log)", text)
    )


def _is_word(text: str) -> bool:
    plain = text.strip()
    return bool(
        re.fullmatch(
            r"\\text\{[^{}]*\}|\(?[A-Za-z]{2,}\)?|\([A-Za-z]\)|\\(?:triangle|angle|overline)\s*\{?\s*[A-Z]+\s*\}?",
            plain,
        )
    )


def _is_product(text: str) -> bool:
    return bool(re.fullmatch(r"[a-z](?:\s*(?:\\cdot|\\times|\*)\s*[a-z])+", text))


def _letters_commute(first: str, second: str) -> bool:
    """Return whether two texts are the same product of variables: `xy` and `yx`, but no words."""
    plain = [re.sub(r"\s", "", text) for text in (first, second)]
    return all(re.fullmatch(r"[a-z]{2,3}", text) and re.search("[xyz]", text) for text in plain) and sorted(
        plain[0]
    ) == sorted(plain[1])


def _strip_membership(text: str) -> str:
    if match := _BUILDER.match(text):
        condition = match[2]
        if _is_inequality(condition) and _inequality_name(condition) == match[1]:
            return condition
    return _MEMBER.sub("", text)


def _plus_minus(text: str) -> list[str]:
    r"""Return both values of an expression with `\pm`; others as they are."""
    if not _PLUS_MINUS.search(text):
        return [text]
    return [_PLUS_MINUS.sub("+", text).replace(r"\mp", "-"), _PLUS_MINUS.sub("-", text).replace(r"\mp", "+")]


def _is_inequality(text: str) -> bool:
    return 2 <= len(split_top(text, _INEQUALITY)) <= 3


def _ascending(text: str) -> list[str]:
    """Return an inequality as [smaller, sign, larger, ...], with `<` and `<=` only."""
    parts = [part.strip() for part in split_top(text, _INEQUALITY)]
    signs = [match[0] for match in _INEQUALITY.finditer(text)]
    names = {"<": "<", "<=": "<=", r"\leq": "<=", ">": "<", ">=": "<=", r"\geq": "<="}
    chain: list[str] = [parts[0]]
    for sign, part in zip(signs, parts[1:], strict=False):
        chain += [names[sign], part]
    return chain[::-1] if signs and (signs[0].startswith(">") or signs[0] == r"\geq") else chain


def _inequality_name(text: str) -> str:
    parts = [part.strip() for part in split_top(text, _INEQUALITY)]
    names = [part for part in parts if re.fullmatch(r"\\?[A-Za-z]+(?:_\{\w+\})?", part)]
    return names[0] if names else ""


def _as_set(text: str) -> str | None:
    """Return the interval of an inequality in one variable, a set or an interval as it is, or None."""
    text = _strip_membership(text)
    if not _INEQUALITY.search(text):
        return text if _bracketed(text) or _UNION.search(text) else None
    if not _is_inequality(text):
        return None
    parts = _ascending(text)
    name = _inequality_name(text)
    if not name or parts.count(name) != 1:
        return None
    place = parts.index(name)
    low, high = r"-\infty", r"\infty"
    left, right = "(", ")"
    if place >= 2:
        low, left = parts[place - 2], "[" if parts[place - 1] == "<=" else "("
    if place + 2 < len(parts):
        high, right = parts[place + 2], "]" if parts[place + 1] == "<=" else ")"
    return f"{left}{low},{high}{right}"


def _bracketed(text: str) -> tuple[str, str, str] | None:
    r"""Return (opening, content, closing) of a text in one pair of brackets: `(`, `[`, `{` for `\{`."""
    text = text.strip()
    for opening, closing, name in ((r"\{", r"\}", "{"), (r"\langle", r"\rangle", "(")):
        if text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : -len(closing)]
            return (name, inner, "}" if name == "{" else ")") if opening not in inner else None
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]":
        return None
    depth = 0
    for place, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            return (text[0], text[1:-1], text[-1]) if place == len(text) - 1 else None
    return None


def _rows(text: str) -> list[list[str]] | None:
    match = _MATRIX.match(text)
    if not match:
        return None
    rows = re.split(r"\\\\", re.sub(r"\\hline", "", match[2]))
    return [[cell.strip() for cell in row.split("&")] for row in rows if row.strip()]
