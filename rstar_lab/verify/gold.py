r"""True answers: read them out of solutions, and find those that no response can meet.

The same reader serves problem files, `data lint`, the doctor and the importers, so that they agree on the answer of a row.
"""

import json
import re
from collections import deque

from rstar_lab.verify.extraction import last_boxed

LONGEST = 200  # characters of an answer in a line of a solution

_MARKED = re.compile(r"(?<!#)####(?!#)[ \t]*(\S.*)")  # the answer of GSM8K, after its solution
# A line after `####` that is a Markdown heading: `Step 1`, `2. Compute the area`, `Final answer`.
_HEADING = re.compile(r"[^\W\d_]{2,}[\s:.]+\S|\d+[.)]\s+[^\W\d_]{2,}")
_STATED = re.compile(r"(?:the|final) answer is:[ \t]*(\S.*)", re.IGNORECASE)  # the last line of MetaMathQA
_ITEM = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|-?\d[\d.eE+-]*)"""
_LIST = re.compile(rf"\[\s*(?=[\"']){_ITEM}(?:\s*,\s*{_ITEM})*+\s*\]", re.DOTALL)
_END_OF_TEXT = ("</s>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<eos>", "<end_of_turn>")
_PLACEHOLDERS = frozenset(("proof", "notfound", "nan", "null", "n/a", "na", "tbd", "todo", "unknown", "seesolution"))


def final_answer(solution: str) -> str:
    r"""Return the final answer of a solution: the last line of `####`, else the last box, else `The answer is: ...`.

    `####` marks the answer of GSM8K. It counts on the last line; before other lines (MetaMathQA, notes, end-of-text tokens)
    it counts if a value follows and no box comes later. A Markdown heading (`#### Step 1`) is not an answer. A list of texts
    as JSON or Python writes it (Skywork-OR1) gives its items, joined by commas. Without any of these the answer is the text.
    """
    text = solution.strip()
    while text.endswith(_END_OF_TEXT):
        text = text[: text.rfind("<")].rstrip()
    if _LIST.fullmatch(text):
        return ", ".join(final_answer(item) for item in _items(text))
    boxed = last_boxed(text)
    marked = _after_mark(text, boxed)
    if marked is not None:
        return marked if (inner := last_boxed(marked)) is None else inner.strip()
    if boxed is not None:
        return boxed.strip()
    if stated := _STATED.search(text.rpartition("\n")[2]):
        return stated[1].strip()
    return text


def _after_mark(text: str, boxed: str | None) -> str | None:
    marks = deque(_MARKED.finditer(text), maxlen=1)
    if not marks:
        return None
    last = marks[0]
    answer = last[1].rpartition("####")[2].strip() or last[1].strip()
    has_digit = re.search(r"\d", answer) is not None
    if last.end() == len(text):
        return answer if boxed is None or has_digit else None
    if len(answer) > LONGEST or _HEADING.match(answer):
        return None
    if boxed is None or (has_digit and last_boxed(text[last.end() :]) is None):
        return answer
    return None


def _items(text: str) -> list[str]:
    r"""Return the items of a flat list of texts. Backslashes that JSON would not keep are LaTeX: `["\frac12"]`."""
    try:
        items = [str(item) for item in json.loads(text)]
    except ValueError:
        items = []
    if items and not any(char < " " for item in items for char in item):
        return items
    found = [item[1:-1] if item[0] in "\"'" else item for item in re.findall(_ITEM, text, re.DOTALL)]
    if re.fullmatch(r"(?:[^\\]|\\\\)*+", text, re.DOTALL):
        found = [item.replace(r"\\", "\\") for item in found]
    return found


def fault_of_answer(answer: str) -> str | None:
    """Return why no response can meet a true answer, as far as its form shows it; None if nothing is wrong with it."""
    text = answer.strip()
    if "####" in text:
        return "contains '####'"
    if "\n" in text and r"\begin{" not in text:
        return "has a line break: it is a solution and not an answer"
    return "is a placeholder" if re.sub(r"[\s_]", "", text).casefold() in _PLACEHOLDERS else None
