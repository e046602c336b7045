"""Read parts of an answer in normalised LaTeX: elements of lists, bracketed groups, names, inequalities, cases and matrices."""

import re
from collections.abc import Sequence
from itertools import accumulate

from rstar_lab.verify.exact import plain_value
from rstar_lab.verify.normalise import Element, group_end, read, split_top, words

_LIST = re.compile(r"[,;]|\\\\")
EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
INEQUALITY = re.compile(r"\\leq(?![a-z])|\\geq(?![a-z])|<=|>=|<|>")
UNION = re.compile(r"\\cup(?![a-z])")
PLUS_MINUS = re.compile(r"\\pm(?![a-z])")
_NAME = re.compile(
    r"(?:\\(?:angle|triangle|operatorname|text|overline|vec|bar|hat|mathbb|mathcal)\s*)?[\\A-Za-z|{}\s]*"
    r"(?:_\{[^{}]*\}|'|\\prime)*(?:\^\{-1\})?(?:\s*\([^()+*/<>=]*\))?(?:\^\{(?:-1|\\prime)\})?"
)
_TUPLE_NAME = re.compile(r"\(\s*\w+(?:_\{\w+\})?(?:\s*,\s*\w+(?:_\{\w+\})?)*\s*\)")
_MEMBER = re.compile(
    r"^\s*(\\?[A-Za-z]+(?:_\{\w+\})?|\(\s*\w+(?:\s*,\s*\w+)+\s*\))\s*\\in\s+(?=\S)|^\s*(\\?[A-Za-z]+(?:_\{\w+\})?)\s*\\in(?=[\[({\\\]])"
)
_BUILDER = re.compile(r"^\\\{\s*(\\?[A-Za-z]+)\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:|\\\|)\s*(.+?)\s*\\\}$")
_MATRIX = re.compile(
    r"^\(?\s*[\[(]?\s*\\begin\{([pbB]?matrix|array)\}(.*?)(?:\\\\)?\s*\\end\{\1\}\s*[\])]?\s*\)?$", re.DOTALL
)
_CONDITION = re.compile(
    r"\s*,?\s*&?\s*,?\s*(?:\\text\{\s*,?\s*(?:if|for|when|where)\s*\}|\b(?:if|for|when|where)\b)\s*&?\s*"
)
_UNEQUAL = re.compile(r"^(\\?[A-Za-z]+)\s*\\neq\s*(.+)$")
_ABSOLUTE = re.compile(r"^\|\s*(\\?[A-Za-z]+)\s*\|\s*(\\leq|<=|<)([^<>|]+)$")
GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+")


def has_variables(text: str) -> bool:
    return bool(re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)))


def choice_letter(choice: re.Match[str]) -> str:
    return (choice[1] or choice[2] or choice[3]).casefold()


def case_rows(match: re.Match[str]) -> list[list[str]]:
    """Return the rows of `cases` as [value, condition], or the rows of a system as [equation]."""
    rows = []
    for row in re.split(r"\\\\", match[3]):
        parts = _CONDITION.split(row, maxsplit=1)
        if len(parts) == 1 and match[2] in ("cases", "array", "matrix") and "=" not in row.split("&")[0]:
            parts = row.split("&")
        cells = [part.replace("&", "").strip().rstrip(",.;").strip() for part in parts]
        if any(cells):
            rows.append(cells)
    return rows


def intersection(conditions: Sequence[str]) -> str | None:
    """Return `a < x < b` for the two conditions `x > a` and `x < b` on one variable; None if they do not overlap."""
    if len(conditions) != 2 or not all(len(split_top(text, INEQUALITY)) == 2 for text in conditions):
        return None
    name = inequality_name(conditions[0])
    chains = sorted((ascending(text) for text in conditions), key=lambda chain: chain[0] == name)
    (low, left, first), (second, right, high) = chains
    bounds = plain_value(low), plain_value(high)
    if not name or not first == second == name or bounds[0] is None or bounds[1] is None:
        return None
    return f"{low}{left}{name}{right}{high}" if bounds[0].number < bounds[1].number else None


def interval_of_unequal(first: str, second: str) -> tuple[str, str]:
    r"""Return both texts, with `x \neq a` as two intervals if the other is a set."""
    texts = [first, second]
    for place, text in enumerate(texts):
        if (match := _UNEQUAL.match(text)) and not _UNEQUAL.match(texts[1 - place]) and "," not in match[2]:
            texts[place] = rf"(-\infty,{match[2]})\cup(({match[2]}),\infty)"
    return texts[0], texts[1]


def without_point(text: str, other: str) -> str:
    """Return the coordinates of a named point `A(1,2)`, if the other answer has no name."""
    return re.sub(r"^[A-Z]\s*(?=\([^()]*,[^()]*\)$)", "", text) if other.startswith("(") else text


def without_derivative(text: str, other: str) -> str:
    """Return the value of `f'(x) = value`, if the other answer has no name."""
    if "=" in other or "'" in other:
        return text
    return re.sub(r"^[A-Za-z]'+\s*(?:\(\s*\w\s*\))?\s*=\s*(?=[^=]+$)", "", text)


def depth(text: str) -> int:
    """Return how deep the brackets of a text are nested."""
    return max(accumulate((char in "([{") - (char in ")]}") for char in text), default=0)


def unwrap(text: str) -> str:
    if (match := re.fullmatch(r"\{(.*)\}", text)) and group_end(text, 0) == len(text):
        return unwrap(match[1].strip())
    match = re.fullmatch(r"\]\s*([^\[\]]+)\s*\[", text)  # French: ]1,2[
    return f"({match[1]})" if match else text


def elements(text: str) -> list[str]:
    if GROUPED.fullmatch(text.strip().lstrip("+-＄ ")):
        return [text]
    text = re.sub(
        r"(?<![\d,])(\d{1,3}(?:,\d{3})+(?:\.\d+)?)(?=\s*(?:$|\\text|[A-Za-z%＄\\]))",
        lambda m: m[1].replace(",", ""),
        text,
    )
    return [part for part in (part.strip() for part in split_top(text, _LIST)) if part]


def hundredth(element: Element) -> Element:
    value = plain_value(element.text)
    if value is not None:
        number = value.number / 100
        return Element(rf"\frac{{{number.numerator}}}{{{number.denominator}}}")
    return Element(rf"\frac{{{element.text}}}{{100}}", prose=element.prose)


def sign_may_be_missing(element: Element) -> bool:
    """Return whether a percentage is also written without its sign: 50, but not 0.5, which is 50%."""
    value = plain_value(element.text)
    return value is None or abs(value.number) >= 1


def named_value(text: str) -> str:
    """Return the value of `name = value`, or the text."""
    parts = split_top(text, EQUALS)
    return parts[1].strip() if len(parts) == 2 and is_name(parts[0]) else text


def without_name(text: str, other: str) -> str:
    r"""Return the value of `name = value` if a word is in it, such as `\text{Re}(z) = 1`, or is the other answer."""
    return named_value(text) if read(text).prose or is_word(other) else text


def is_name(text: str) -> bool:
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


def same_name(first: str, second: str) -> bool:
    """Return whether two names are equal, or one is `y` and the other a function of x, as in `f(x)`."""
    if "y" in (first, second) and re.fullmatch(r"[fghy]\s*\(\s*x\s*\)", second if first == "y" else first):
        return True
    return words(first) == words(second)


def is_word(text: str) -> bool:
    plain = text.strip()
    return bool(
        re.fullmatch(
            r"\\text\{[^{}]*\}|\(?[A-Za-z]{2,}\)?|\([A-Za-z]\)|\\(?:triangle|angle|overline)\s*\{?\s*[A-Z]+\s*\}?",
            plain,
        )
    )


def is_product(text: str) -> bool:
    return bool(re.fullmatch(r"[a-z](?:\s*(?:\\cdot|\\times|\*)\s*[a-z])+", text))


def letters_commute(first: str, second: str) -> bool:
    """Return whether two texts are the same product of variables: `xy` and `yx`, but no words."""
    plain = [re.sub(r"\s", "", text) for text in (first, second)]
    return all(re.fullmatch(r"[a-z]{2,3}", text) and re.search("[xyz]", text) for text in plain) and sorted(
        plain[0]
    ) == sorted(plain[1])


def strip_membership(text: str) -> str:
    if match := _BUILDER.match(text):
        condition = match[2]
        if is_inequality(condition) and inequality_name(condition) == match[1]:
            return condition
    if match := _ABSOLUTE.match(text):
        return f"-({match[3]}){match[2]} {match[1]}{match[2]} {match[3]}"
    return _MEMBER.sub("", text)


def plus_minus(text: str) -> list[str]:
    r"""Return both values of an expression with `\pm`; others as they are."""
    if not PLUS_MINUS.search(text):
        return [text]
    return [PLUS_MINUS.sub("+", text).replace(r"\mp", "-"), PLUS_MINUS.sub("-", text).replace(r"\mp", "+")]


def is_inequality(text: str) -> bool:
    return 2 <= len(split_top(text, INEQUALITY)) <= 3


def ascending(text: str) -> list[str]:
    """Return an inequality as [smaller, sign, larger, ...], with `<` and `<=` only."""
    parts = [part.strip() for part in split_top(text, INEQUALITY)]
    signs = [match[0] for match in INEQUALITY.finditer(text)]
    names = {"<": "<", "<=": "<=", r"\leq": "<=", ">": "<", ">=": "<=", r"\geq": "<="}
    chain: list[str] = [parts[0]]
    for sign, part in zip(signs, parts[1:], strict=False):
        chain += [names[sign], part]
    return chain[::-1] if signs and (signs[0].startswith(">") or signs[0] == r"\geq") else chain


def inequality_name(text: str) -> str:
    parts = [part.strip() for part in split_top(text, INEQUALITY)]
    names = [part for part in parts if re.fullmatch(r"\\?[A-Za-z]+(?:_\{\w+\})?", part)]
    return names[0] if names else ""


def as_set(text: str) -> str | None:
    """Return the interval of an inequality in one variable, a set or an interval as it is, or None."""
    text = strip_membership(text)
    if not INEQUALITY.search(text):
        return text if bracket_group(text) or UNION.search(text) else None
    if not is_inequality(text):
        return None
    parts = ascending(text)
    name = inequality_name(text)
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


def bracket_group(text: str) -> tuple[str, str, str] | None:
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


def matrix_rows(text: str) -> list[list[str]] | None:
    match = _MATRIX.match(text)
    if not match:
        return None
    rows = re.split(r"\\\\", re.sub(r"\\hline", "", match[2]))
    return [[cell.strip() for cell in row.split("&")] for row in rows if row.strip()]
