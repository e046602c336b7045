r"""Find the final answer in a response: in the answer tags, in a box, or the last number."""

import re
from collections import deque
from typing import Literal, get_args

from rstar_lab.verify.tokens import VULGAR_FRACTIONS

AnswerFormat = Literal["tagged", "boxed", "last_number"]
ANSWER_FORMATS: tuple[AnswerFormat, ...] = get_args(AnswerFormat)

MAX_SEARCHED = 2_000_000  # number of characters at the end of a response that are searched for an answer

_FIRST_BOX = re.compile(r"(?<!\\)\\++(?:boxed|f(?:rame)?box)")
_BRACES = re.compile(r"\\(?:boxed|f(?:rame)?box)\s*\{|\\.|[{}]", re.DOTALL)
# `\boxed 2`, `\boxed\frac12`: TeX boxes the next symbol.
_ARGUMENT = r"\s*(?:\{[^{}]*\}|\d|[A-Za-z])"
_UNBRACED = re.compile(
    rf"(?<!\\)\\(?:boxed|f(?:rame)?box)\s*(\\[dt]?frac{_ARGUMENT}{_ARGUMENT}|\\sqrt{_ARGUMENT}|-?\d+(?:[.,]\d+)*|\\[A-Za-z]+|[A-Za-z](?![A-Za-z]))"
)
# What may stand between the boxes of one answer: `$\boxed{3}$ and $\boxed{5}$`, or only space.
_BETWEEN = re.compile(
    r"(?:[\s$]|\\[,;: ()\[\]\\]|\\quad)*+(?:[-*•]\s|,|;|、|和|或|,?\s*(?:\\text\{\s*)?(?:and|or)(?:\s*\})?|&)?"
    r"(?:[\s$]|\\[,;: ()\[\]]|\\quad)*+(?:[A-Za-z](?:_\{?\w\}?)?\s*=\s*)?[\s$]*"
)
_GROUP = r"(?:,|\{,\}|\\[,!;:]|\\!,|[ \u00a0\u2009\u202f])"
_VULGAR = "".join(VULGAR_FRACTIONS)
_EXPONENT = r"(?:\s*\^\s*\{?[-+−]?\d+\}?|[⁺⁻]?[⁰¹²³⁴-⁹]+)"
_FRACTION = r"\\[dt]?frac\{\d+\}\{\d+\}"
# A minus sign after a digit, a letter or a closing bracket is a subtraction, not a sign. Only ASCII letters belong to a
# name with digits; in other scripts words and numbers stand side by side.
_SIGN = r"(?:(?<![)\]}0-9])(?<![)\]}0-9]\s)[-+−]|(?:(?<=[=:(,])|(?<=[=:(,]\s)|(?<=[a-z]{2}\s)|\A\s*)[-−–]\s)"
_NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_^])(?<![0-9]\.)(?<!\^\{{)(?<!\^\{{-)(?:{_SIGN}(?:\\?[$€£])?)?(?:(?:\d{{1,3}}(?:{_GROUP}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    rf"(?:[eE][-+]?\d+(?![\w.])|(?:\s*(?:\\times|×|\*)\s*10)?{_EXPONENT}|[{_VULGAR}]|\s*{_FRACTION})?"
    r"(?:/\d+|(?<=\d) \d+/\d+)?(?:\\?%)?"
    rf"|[-+−]?{_FRACTION}|[-+−]?[{_VULGAR}]"
)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}` with balanced braces, or None.

    Of nested boxes the inner one is returned. An empty box is ignored if there is another. Several boxes of one answer
    (`\boxed{3} and \boxed{5}`) are joined by commas. A box without braces (`\boxed 2`) holds the next number or symbol.
    """
    first = _FIRST_BOX.search(text)
    if first is None:
        return None
    open_braces: list[
        tuple[int, int] | None
    ] = []  # for each open brace of a box: start of the box, start of its content
    boxes: deque[tuple[int, int, int]] = deque(maxlen=20)  # start of the box, start of its content, end
    for match in _BRACES.finditer(text, first.start()):
        token = match[0]
        if token == "}":
            if open_braces and (box := open_braces.pop()):
                boxes.append((*box, match.start()))
        elif token == "{":
            open_braces.append(None)
        elif token.startswith(("\\boxed", "\\fbox", "\\framebox")):
            open_braces.append((match.start(), match.end()))
    unbraced = deque(_UNBRACED.finditer(text, first.start()), maxlen=20)
    found = sorted([*boxes, *((m.start(), m.start(1), m.end(1)) for m in unbraced)], key=lambda box: box[1])
    filled = [box for box in found if text[box[1] : box[2]].strip()]
    if not filled:
        return text[found[-1][1] : found[-1][2]] if found else None
    last = filled.pop()
    parts = [text[last[1] : last[2]]]
    while filled and filled[-1][2] <= last[0]:
        before = filled.pop()
        if not _BETWEEN.fullmatch(text[before[2] + (text[before[2] : before[2] + 1] == "}") : last[0]]):
            break
        if text[before[1] : before[2]].strip() != parts[0].strip():
            parts.insert(0, text[before[1] : before[2]])
        last = before
    return ", ".join(parts)


def last_number(text: str) -> str | None:
    """Return the last number in the text as written (integer, decimal, fraction or percentage), or None."""
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    return numbers[0][0] if numbers else None


def extract_answer(response_text: str, answer_format: AnswerFormat = "tagged") -> str | None:
    r"""Return the final answer of a response, or None if it has none.

    Args:
        response_text: The model's own text only. Tool output must not count as the model's answer.
        answer_format: Where the answer is read from. `tagged`: the last `\boxed{}` in the last `<answer>...</answer>`
            (rStar2-Agent). `boxed`: the last `\boxed{}` anywhere in the response (microsoft/rStar's math graders).
            `last_number`: the last number in the response (the usual rule for GSM8K).

    Raises:
        ValueError: For an unknown answer_format.
    """
    if answer_format == "boxed":
        return last_boxed(response_text[-MAX_SEARCHED:])
    if answer_format == "last_number":
        return last_number(response_text[-MAX_SEARCHED:])
    if answer_format != "tagged":
        raise ValueError(f"unknown answer format {answer_format!r}; expected one of {', '.join(ANSWER_FORMATS)}")
    end = response_text.rfind("</answer>")
    start = response_text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start < 0:
        return None
    return last_boxed(response_text[max(start + len("<answer>"), end - MAX_SEARCHED) : end])
