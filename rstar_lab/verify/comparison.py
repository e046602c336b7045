"""Compare the final answer of a response with the true answer.

The steps of a comparison and the size of its numbers are limited (`numeric`), because a model can write expressions such as
`9^{9^{9^9}}`.
"""

import logging
import re
from collections.abc import Iterable
from functools import cache

from rstar_lab.common.errors import UserError
from rstar_lab.verify import equality
from rstar_lab.verify.extraction import AnswerFormat, extract_answer
from rstar_lab.verify.gold import fault_of_answer, final_answer
from rstar_lab.verify.numeric import NotComputed, NoValue
from rstar_lab.verify.syntax import MAX_WORDS, read
from rstar_lab.verify.tokens import Unreadable
from rstar_lab.verify.values import Group, Text

MAX_EXPRESSION = 2_000  # characters; longer answers are compared as text only

log = logging.getLogger(__name__)

_INTEGER = re.compile(r"([+-]?)([0-9]++)((?:,[0-9]{3})*+)")


class Undecided(UserError):
    """An answer was not graded, because the grader or its sandbox failed. It is neither correct nor wrong."""


def canonical_integer(text: str) -> str | None:
    """Return an integer in normal form, without plus sign, leading zeros and separators ("025", "+7", "1,234").

    Returns None for all other text. Works on strings, so that Python's limit on integer digits does not apply.
    """
    match = _INTEGER.fullmatch(text)
    if not match:
        return None
    first = match[2].lstrip("0")
    if match[3] and len(first) > 3:
        return None
    digits = (first + match[3].replace(",", "")).lstrip("0") or "0"
    return "-" + digits if match[1] == "-" and digits != "0" else digits


def same_answer(candidate: str, answer: str) -> bool:
    r"""Return whether two answers (without tags and box) are equal, by the rules of docs/evaluation.md.

    candidate: the answer to check. answer: the true answer. Raises Undecided if the comparison fails through an internal error.
    """
    same = compare(candidate, answer)
    if same is None:
        raise Undecided(f"an internal error of verify: {candidate!r:.80} was not compared with {answer!r:.80}")
    return same


def compare(candidate: str, answer: str) -> bool | None:
    """Return `same_answer`, or None if the comparison fails through an internal error. Such an error is logged once."""
    candidate, answer = candidate.strip(), answer.strip()
    if answer.startswith(("['", '["')):  # a list of texts
        answer = final_answer(answer)
    if not candidate or not answer:
        return False
    if candidate == answer:
        return True
    left, right = canonical_integer(candidate), canonical_integer(answer)
    if left is not None and right is not None:
        return left == right
    if max(len(candidate), len(answer)) > MAX_EXPRESSION:
        return False
    try:
        return equality.equal(candidate, answer)
    except (Unreadable, NoValue, NotComputed, RecursionError):  # answers that cannot be compared count as different
        return False
    except Exception as error:  # an answer must not end a training
        _log_error(type(error).__name__)
        return None


@cache
def _log_error(kind: str) -> None:
    """Log the exception that is being handled, if it is the first of its type."""
    log.exception("an internal error of verify; the answer is neither correct nor wrong")


def verify(response_text: str, answer: str, *, answer_format: AnswerFormat = "tagged") -> bool:
    """Return whether the final answer of a response equals `answer`.

    The steps of a comparison are limited; one that needs more is different. So the result comes within 5 s on a machine with a
    free core, and does not depend on the machine and its load. It works in any thread or event loop.

    Args:
        response_text: The model's own text only, never tool output.
        answer: The true answer.
        answer_format: Where the answer is read from, see `extract_answer`.
    """
    candidate = extract_answer(response_text, answer_format)
    return candidate is not None and same_answer(candidate, answer)


def readable(answer: str) -> bool:
    """Return whether a true answer is read as mathematics or as a few words. Others are compared as text only.

    False also for what no response can meet: a solution, a placeholder (see `gold.fault_of_answer`).
    """
    if fault_of_answer(answer) is not None or len(answer) > MAX_EXPRESSION:
        return False
    try:
        value = read(answer)
    except (Unreadable, RecursionError):
        return False
    items = value.items if isinstance(value, Group) else (value,)
    return all(len(item.words) <= MAX_WORDS for item in items if isinstance(item, Text))


def verify_many(pairs: Iterable[tuple[str, str]], *, answer_format: AnswerFormat = "tagged") -> list[bool]:
    """Return `verify` for each pair, in order.

    Args:
        pairs: Response text and true answer.
        answer_format: As recipe key `rl.answer`.
    """
    return [verify(*pair, answer_format=answer_format) for pair in pairs]
