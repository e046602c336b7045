"""Compare the final answer of a response with the true answer.

Most pairs are compared in this process, with bounded numbers (`equality`). Those that need algebra go to worker processes (`pool`),
because a model can write expressions that hang sympy or exhaust memory, such as `9^{9^{9^9}}`.
"""

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from rstar_lab.verify import equality
from rstar_lab.verify.extraction import AnswerFormat, extract_answer
from rstar_lab.verify.gold import fault_of_answer
from rstar_lab.verify.pool import WORKERS, workers

MAX_QUICK = 400  # characters of an answer that is compared in this process
MAX_EXPRESSION = 2_000  # characters; longer answers are compared as text only

_INTEGER = re.compile(r"([+-]?)([0-9]++)((?:,[0-9]{3})*+)")


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


def _strip(text: str) -> str:
    text = text.strip()
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        text = text[1:-1].strip()
    return text[:-1] if text[-1:] == "." and text[-2:-1].isdigit() else text  # the period of a sentence


def same_answer(candidate: str, answer: str, *, slice_s: float | None = None) -> bool:
    r"""Return whether two answers (without tags and box) are equal, by the rules of docs/evaluation.md.

    Args:
        candidate: The answer to check.
        answer: The true answer.
        slice_s: See `verify`.

    Raises:
        Undecided: See `verify`.
        UserError: If sympy is needed and not installed.
    """
    candidate, answer = _strip(candidate), _strip(answer)
    if not candidate or not answer:
        return False
    if candidate == answer:
        return True
    left, right = canonical_integer(candidate), canonical_integer(answer)
    if left is not None and right is not None:
        return left == right
    if max(len(candidate), len(answer)) > MAX_EXPRESSION:
        return False
    decided = quick(candidate, answer)
    return workers.compare(candidate, answer, slice_s=slice_s) if decided is None else decided


def quick(candidate: str, answer: str) -> bool | None:
    """Return whether two answers are equal, or None if that is decided in a worker process."""
    if max(len(candidate), len(answer)) > MAX_QUICK:
        return None
    try:
        return equality.equal(candidate, answer)
    except Exception:  # NeedsAlgebra, or an error, which must not end a training: the worker process decides
        return None


def verify(
    response_text: str, answer: str, *, answer_format: AnswerFormat = "tagged", slice_s: float | None = None
) -> bool:
    """Return whether the final answer of a response equals `answer`.

    A comparison has 0.75 s of CPU time, whatever else the machine does; one that needs more is different. So the result comes
    within 5 s on a machine with a free core, and does not depend on the load. It works in any thread or event loop.

    Args:
        response_text: The model's own text only, never tool output.
        answer: The true answer.
        answer_format: Where the answer is read from, see `extract_answer`.
        slice_s: CPU seconds after which a comparison stops and raises Undecided. Default: no such limit.

    Raises:
        Undecided: If there was no result within two minutes, because the machine is overloaded or kills the workers. Such
            an answer is neither correct nor wrong.
        UserError: If sympy is needed and not installed.
    """
    candidate = extract_answer(response_text, answer_format)
    return candidate is not None and same_answer(candidate, answer, slice_s=slice_s)


def readable(answer: str) -> bool:
    """Return whether a true answer is read as mathematics or as a few words. Others are compared as text only.

    False also for what no response can meet: a solution, a placeholder (see `gold.fault_of_answer`).
    """
    answer = _strip(answer)
    if fault_of_answer(answer) is not None:
        return False
    return len(answer) <= MAX_EXPRESSION and equality.readable(answer)


def verify_many(
    pairs: Iterable[tuple[str, str]], *, answer_format: AnswerFormat = "tagged", concurrency: int = WORKERS
) -> list[bool]:
    """Return `verify` for each pair, in order.

    Args:
        pairs: (response text, answer). Each pair has its own limit.
        answer_format: Where the response contains its answer, as recipe key `rl.answer`.
        concurrency: Comparisons at the same time.
    """
    with ThreadPoolExecutor(max(1, concurrency)) as threads:
        return list(threads.map(lambda pair: verify(*pair, answer_format=answer_format), pairs))


def warm_up(timeout_s: float = 60.0) -> None:
    """Start the worker processes before the first answer (1.5 s of one core for importing sympy).

    Raises UserError if the start fails.
    """
    workers.warm_up(timeout_s)
