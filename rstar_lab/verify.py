r"""Answer verification: extract the final answer of a response and compare it with the true answer.

`verify(response_text, answer)` returns whether they are equal. Integers, percentages and identical texts are compared
in this process. All other pairs go to math-verify in a separate process (`rstar_lab.verify_workers`), because a model
can write expressions that hang sympy or exhaust memory, such as `9^{9^{9^9}}`.

Source of the default rule: rStar2-Agent, section 2: the reward is 1 exactly if the boxed answer inside the answer tags
equals the true answer.
"""

import importlib.util
import re
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, get_args

from rstar_lab.errors import UserError
from rstar_lab.verify_workers import IDLE_WORKERS, TOTAL_S, workers

AnswerFormat = Literal["tagged", "boxed", "last_number"]
ANSWER_FORMATS: tuple[AnswerFormat, ...] = get_args(AnswerFormat)

MAX_EXPRESSION = 2_000  # characters; longer answers are compared as text only
MAX_SEARCHED = 2_000_000  # number of characters at the end of a response that are searched for an answer


# --- extraction ------------------------------------------------------------------------------------------------------

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
# A minus sign after a digit, a letter or a closing bracket is a subtraction, not a sign.
_NUMBER = re.compile(
    r"(?<![\w.])(?:(?<![)\]}])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:/\d+)?(?:\\?%)?"
)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` with balanced braces (the inner one if nested), or None."""
    open_braces: list[int | None] = []  # for each open brace: where the content starts if it belongs to a box
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        token = match[0]
        if token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
        elif token == "{":
            open_braces.append(None)
        elif token.startswith("\\boxed"):
            open_braces.append(match.end())
    return text[slice(*last)] if last else None


def last_number(text: str) -> str | None:
    """Return the last number in the text as written (integer, decimal, fraction or percentage), or None."""
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    return numbers[0][0] if numbers else None


def extract_answer(response_text: str, answer_format: AnswerFormat = "tagged") -> str | None:
    r"""Return the final answer of a response, or None if it has none.

    response_text: the model's own text only. Tool output must not count as the model's answer.
    answer_format: where the answer is read from.
        tagged: the last `\boxed{}` in the last `<answer>...</answer>` (rStar2-Agent).
        boxed: the last `\boxed{}` anywhere in the response (microsoft/rStar's math graders).
        last_number: the last number in the response (the usual rule for GSM8K).
    Raises ValueError for an unknown answer_format.
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


# --- comparison ------------------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"([+-]?)0*([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)")
_PERCENTAGE = re.compile(r"([+-]?(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+))(?:\s|\\[ ,:;!]|~)*\\?%")


def canonical_integer(text: str) -> str | None:
    """Return an integer in normal form, without plus sign, leading zeros and separators ("025", "+7", "1,234").

    Returns None for all other text. Works on strings, so that Python's limit on integer digits does not apply.
    """
    match = _INTEGER.fullmatch(text)
    if not match:
        return None
    digits = match[2].replace(",", "").lstrip("0") or "0"
    return "-" + digits if match[1] == "-" and digits != "0" else digits


def _strip(text: str) -> str:
    text = text.strip()
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        text = text[1:-1].strip()
    return text[:-1] if text[-1:] == "." and text[-2:-1].isdigit() else text  # the period of a sentence


def same_answer(candidate: str, answer: str, *, slice_s: float | None = None) -> bool:
    r"""Return whether two answers (without tags and box) are equal. Returns within 5 s, in any thread.

    A percentage equals its number and its fraction: `50\%` equals 50 and 0.5. slice_s: see `verify`.
    Raises UserError if math-verify is needed and not installed.
    """
    deadline = time.monotonic() + TOTAL_S
    candidate, answer = _strip(candidate), _strip(answer)
    percent, percent_answer = _PERCENTAGE.fullmatch(candidate), _PERCENTAGE.fullmatch(answer)
    if percent and percent_answer:
        return _equal(percent[1], percent_answer[1], deadline, slice_s)
    if percent:
        return any(_equal(value, answer, deadline, slice_s) for value in _percentage_values(percent[1]))
    if percent_answer:
        return any(_equal(candidate, value, deadline, slice_s) for value in _percentage_values(percent_answer[1]))
    return _equal(candidate, answer, deadline, slice_s)


def _percentage_values(number: str) -> tuple[str, str]:
    return number, rf"\frac{{{number.replace(',', '')}}}{{100}}"


def _equal(candidate: str, answer: str, deadline: float, slice_s: float | None) -> bool:
    if not candidate or not answer:
        return False
    if candidate == answer:
        return True
    left, right = canonical_integer(candidate), canonical_integer(answer)
    if left is not None and right is not None:
        return left == right
    if max(len(candidate), len(answer)) > MAX_EXPRESSION:
        return False
    return workers.compare(candidate, answer, max(0.0, deadline - time.monotonic()), slice_s)


def verify(
    response_text: str, answer: str, *, answer_format: AnswerFormat = "tagged", slice_s: float | None = None
) -> bool:
    """Return whether the final answer of a response equals `answer`.

    Returns within 5 s for any input, in any thread or event loop. answer_format: see `extract_answer`.
    slice_s: CPU seconds after which a comparison stops and raises verify_workers.Undecided; None: no such limit.
    Raises UserError if math-verify is needed and not installed.
    """
    candidate = extract_answer(response_text, answer_format)
    return candidate is not None and same_answer(candidate, answer, slice_s=slice_s)


def released_grade(response_text: str, answer: str) -> bool:
    """Return whether the graders of microsoft/rStar accept a response: verl's prime_math, else math-verify.

    They read the answer from the whole response. Returns within 5 s. Requires verl and math-verify; raises UserError without
    them.
    """
    if importlib.util.find_spec("verl") is None:
        raise UserError("rl.reward: released needs verl's grader: pip install 'rstar_lab[verl]'")
    return workers.compare(response_text[-MAX_SEARCHED:], answer, grader="released")


def verify_many(
    pairs: Iterable[tuple[str, str]], *, answer_format: AnswerFormat = "tagged", concurrency: int = IDLE_WORKERS
) -> list[bool]:
    """Return `verify` for each (response_text, answer), in order. Each pair has its own limit of 5 s."""
    with ThreadPoolExecutor(max(1, concurrency)) as threads:
        return list(threads.map(lambda pair: verify(*pair, answer_format=answer_format), pairs))


def warm_up(timeout_s: float = 60.0) -> None:
    """Start the worker processes before the first answer (1.5 s of one core for importing sympy).

    Without this call the first answer's limit of 5 s includes the start. Raises UserError if the start fails.
    """
    workers.warm_up(timeout_s)
