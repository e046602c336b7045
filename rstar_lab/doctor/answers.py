"""Answers of the model: read from its texts where a log has no column with them, and compared with the true ones."""

import re
from collections.abc import Callable, Iterable
from itertools import pairwise

import pandas as pd

from rstar_lab import verify
from rstar_lab.analysis.runs import Runs
from rstar_lab.exchange.rollout_rows import FOREIGN_NAMES
from rstar_lab.runs.messages import read_messages
from rstar_lab.untrusted.text import counted
from rstar_lab.verify.gold import final_answer

LONGEST = 200  # characters of an answer; a longer true answer is a worked solution
COMPARED = 500  # pairs of an answer and a true one that are compared as formulas; the others are unknown
HEDGE = re.compile(r"\b(?:or|maybe|either|possibly)\b|\?", re.IGNORECASE)  # words of an answer that names several
_MARKUP = re.compile(r"\\(?:text|mathrm|mathbf|boxed|left|right|[,;! ])|[\s${}*]|(?<=\d),(?=\d{3}(?!\d))")
_FRACTION = re.compile(r"(-?)(?:\\[dt]?frac\{(-?\d{1,15})\}\{(\d{1,15})\}|(\d{1,15})/(\d{1,15}))")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,2})?")
_CHOICE = re.compile(r"\(?[a-j]\)?|yes|no|true|false")
_NOUNS, _VERBS = ("|".join(FOREIGN_NAMES["answers"][name]) for name in ("nouns", "verbs"))
_STATED = re.compile(rf"""(?:{_NOUNS})["*_]*\s*(?:[:：=]|(?:{_VERBS})[:：]?)\s*["*_$]*\s*([^\n]+)""", re.IGNORECASE)
_DECIMALS = re.compile(r"[-+]?\d*(?:\.|(?:,|\{,\})(?!\d{3}$))(\d+)")  # a comma can be decimal
_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")


def with_texts(rollouts: pd.DataFrame, runs: Runs) -> tuple[pd.DataFrame, list[str]]:
    r"""Return the rollouts with the answers, the numbers of candidates and the lengths that follow from their texts, and notes about it.

    An answer is the last `\boxed{}` in `<answer>` tags; if most completions have no such tags, the last one anywhere; if they have no
    box, the text of the tags, after `####`, or after `Answer:` or `the answer is`. No answers are read if the log has answers, and if
    the reward has many values, because a part of it then says nothing about the answer.

    Without counts of tokens, a length is a quarter of the characters of the model's text. `ending` is `model` for a rollout that ends with
    a turn without call, `unfinished` if it ends with the output of a tool after which others go on, otherwise `tool`, as for `submit`.
    """
    notes = []
    structured = rollouts.truth.astype(str).str.match(
        r"(?!\s*\[\s*\"[^\"]*\"\s*\]\s*$)\s*(?:\[\s*[\"\[{]|\{\s*\")", na=False
    )
    if structured.any():
        rollouts = rollouts.assign(truth=rollouts.truth.mask(structured))
        named = counted(int(structured.sum()), "true answer")
        notes.append(f"{named} not compared, because a list or an object is no single answer")
    rollouts = rollouts.assign(truth=rollouts.truth.map(_short, na_action="ignore"))
    texts: dict[str, tuple[str | None, ...]] = {}
    lengths, candidates = dict[str, float](), dict[str, int]()
    ends, continued = dict[str, str | None](), set[str]()
    for step in sorted(rollouts.step.unique()):  # the texts of all steps can be larger than the memory
        for row in runs.arrow("SELECT traj_id, messages FROM transcripts WHERE step = ?", [int(step)]).to_pylist():
            messages = read_messages(row["messages"])
            roles = [message["role"] for message in messages]
            continued |= {
                str(messages[n]["tool"]) for n, pair in enumerate(pairwise(roles)) if pair == ("tool", "assistant")
            }
            last = messages[-1] if messages else {"role": "other", "content": ""}
            called = None if "<tool_call>" in last["content"] else ""
            ends[row["traj_id"]] = str(last["tool"]) if last["role"] == "tool" else called
            text = "\n".join(message["content"] for message in messages if message["role"] == "assistant")
            lengths[row["traj_id"]] = len(text) / 4
            texts[row["traj_id"]] = tuple(reader(text) for reader in _READERS)
            candidates[row["traj_id"]] = len(_candidates(text))
    tools = rollouts.traj_id.map(ends)  # whose output ends the rollout
    ending = tools.isin(continued).map({True: "unfinished", False: "tool"}).where(tools != "", "model")
    rollouts = rollouts.assign(candidates=rollouts.traj_id.map(candidates).astype(float), ending=ending)
    if rollouts.truncated.any() and rollouts.truncated.dropna().all():  # only those that were cut are marked
        rollouts = rollouts.assign(truncated=rollouts.truncated.notna())
    if rollouts.response_tokens.isna().all():
        rollouts = rollouts.assign(response_tokens=rollouts.model_tokens)
    if rollouts.response_tokens.isna().all():
        rollouts = rollouts.assign(response_tokens=rollouts.traj_id.map(lengths))
        notes.append("lengths of responses are estimated as a quarter of their characters")
    if rollouts.answer.notna().any():
        return rollouts, notes
    if rollouts.reward.nunique() > 4:
        return rollouts, [*notes, "answers are not read from the texts, because the reward has more than four values"]
    found = pd.DataFrame.from_dict(texts, orient="index").reindex(rollouts.traj_id).set_axis(rollouts.index)
    counts = found.notna().sum()
    chosen = found.iloc[:, next(i for i, count in enumerate(counts) if 2 * count >= counts.max())]
    if left := chosen.isna().sum():
        notes.append(f"no answer was found in {left:,} of {len(chosen):,} rollouts; a column `pred` with them is read")
    return rollouts.assign(answer=chosen), notes


def _in_tags(text: str) -> str | None:
    _, tag, content = text.rpartition("</answer>")[0].rpartition("<answer>")
    return content.strip()[:LONGEST] or None if tag else None


def _after_hashes(text: str) -> str | None:
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0][:LONGEST] or None if mark else None


def _stated(text: str) -> str | None:
    """Return what follows the last `Answer:`, `The answer is` or `"answer":` of a text."""
    matches = _STATED.findall(text[-4000:])
    if not matches:
        return None
    answer = re.split(r"[.!]\s|[\"}。]|\*\*", matches[-1])[0]
    return answer.strip(" .*$\"'")[:LONGEST] or None


_READERS: tuple[Callable[[str], str | None], ...] = (
    verify.extract_answer,
    verify.last_boxed,
    _in_tags,
    _after_hashes,
    _stated,
)


def _candidates(text: str) -> set[str]:
    """Return the different answers that a text ends with: the last boxes with little text between them, or the items of the last one."""
    boxes = list(_BOX.finditer(text[-4000:]))
    last = boxes[-1:]
    for before, after in reversed(list(pairwise(boxes))):
        if after.start() - before.end() > 40:
            break
        last = [before, *last]
    answer = next((found for reader in _READERS if (found := reader(text))), "")
    return {plain_text(box[1]) for box in last} if len(last) > 1 else set(_items(answer))


def _items(answer: str) -> list[str]:
    """Return the numbers of an answer that is a list of numbers, each once; none for other answers."""
    parts = [plain_text(part) for part in re.split(r"(?<!\{),(?!\d{3}(?!\d))|;|\band\b|\bor\b|\n", answer)]
    return list(dict.fromkeys(parts)) if len(parts) > 1 and all(_number(part) is not None for part in parts) else []


def _short(truth: object) -> str | None:
    """Return the answer of a true solution; None if the text holds none."""
    answer = final_answer(str(truth))
    return answer if len(answer) <= LONGEST else None


def plain_text(answer: object) -> str:
    """Return an answer without spaces, markup, separators of thousands and a final dot, in lower case."""
    return _MARKUP.sub("", str(answer)).rstrip(".").lower()


def _number(answer: str) -> float | None:
    """Return the value of a decimal number or of a fraction of integers, None for other texts."""
    if fraction := _FRACTION.fullmatch(re.sub(r"[\s$]|\.$", "", answer)):
        sign, above, below = fraction[1], *(part for part in fraction.groups()[1:] if part is not None)
        return (-1 if sign else 1) * float(above) / float(below) if float(below) else None
    plain = plain_text(answer)
    return float(plain) if len(plain) < 30 and _DECIMAL.fullmatch(plain) else None


def compare(answers: Iterable[object], truths: Iterable[object]) -> list[bool | None]:
    """Return for each answer whether it is equal to the true one; None if one is missing or the texts do not decide.

    The reward plays no part in it. A list of numbers and an answer with "or" are not equal to a single number, and a word that is the
    true answer of one problem, such as a label, is not equal to that of another one.
    """
    known: dict[tuple[object, object], bool | None] = {}
    pairs = list(zip(answers, truths, strict=True))
    formulas, words = 0, {text for _, truth in pairs if (text := plain_text(truth)).isalpha()}
    for answer, truth in dict.fromkeys(pairs):
        if not isinstance(answer, str) or not isinstance(truth, str) or not plain_text(answer):
            known[answer, truth] = None
            continue
        decided = _decided(answer, truth, words)
        if decided is None and formulas < COMPARED and max(len(answer), len(truth)) <= LONGEST:
            formulas += 1
            decided = verify.compare(answer, truth) or None  # what it calls unequal can be another notation
        known[answer, truth] = decided
    return [known[pair] for pair in pairs]


def _decided(answer: str, truth: str, words: set[str]) -> bool | None:
    """Return whether two answers are equal, if they are numbers, choices or among `words`; None if this does not decide it."""
    first, second = plain_text(answer), plain_text(truth)
    left, right = _number(answer), _number(truth)
    if right is None:
        closed = {first, second} <= words or (_CHOICE.fullmatch(first) and _CHOICE.fullmatch(second))
        return True if first == second else False if closed else None
    if first == second or (left is not None and abs(left - right) <= 1e-6 * max(1.0, abs(right))):
        return True
    if decimals := _DECIMALS.fullmatch(answer.strip(" $")):
        value = float(re.sub(r"\{?,\}?", ".", decimals[0]))
        if abs(value - right) <= 0.501 * 10.0 ** -len(decimals[1]):
            return True if value == right else None  # some graders allow rounded values
    return False if left is not None or HEDGE.search(answer) or len(_items(answer)) > 1 else None
