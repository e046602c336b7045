"""Answers of the model that a foreign log does not have as a column, read from its completions."""

import re
from collections.abc import Callable

import pandas as pd

from rstar_lab.analysis.runs import Runs
from rstar_lab.doctor.rule import HEDGE
from rstar_lab.runs.messages import own_texts
from rstar_lab.untrusted.text import counted
from rstar_lab.verify import extract_answer, last_boxed
from rstar_lab.verify.structure import quick

LONGEST = 200  # characters of an answer; a longer true answer is a worked solution


def with_texts(rollouts: pd.DataFrame, runs: Runs) -> tuple[pd.DataFrame, list[str]]:
    r"""Return the rollouts with the answers and lengths that follow from their texts, and notes about it.

    An answer is the last `\boxed{}` in `<answer>` tags; if most completions have no such tags, the last one anywhere; if they have no
    box, the text of the tags or after `####`. It is written as the true one if both are equal, or if texts and plain numbers do not
    decide and the rollout has the reward. No answers are read without true ones, if the log has answers, and if the reward has more
    than two values, because a part of it then says nothing about the answer.

    Without counts of tokens, a length is a quarter of the characters of the model's text.
    """
    notes = []
    structured = rollouts.truth.astype(str).str.match(r"\s*(?:\[\s*[\"\[{]|\{\s*\")", na=False)
    if structured.any():
        rollouts = rollouts.assign(truth=rollouts.truth.mask(structured))
        notes.append(
            f"{counted(int(structured.sum()), 'true answer')} not compared, because a list or an object is no single answer"
        )
    truths = rollouts.truth.map(_short, na_action="ignore")
    rewards = set(rollouts.reward.dropna())
    binary = len(rewards) <= 2 and sum(value > 0 for value in rewards) <= 1
    wanted = truths.notna().any() and not rollouts.answer.notna().any()
    if rollouts.response_tokens.isna().all():
        rollouts = rollouts.assign(response_tokens=rollouts.model_tokens)
    unmeasured = bool(rollouts.response_tokens.isna().all())
    if wanted and not binary:
        notes.append("answers are not read from the texts, because the reward has more than two values")
        wanted = False
    if not wanted and not unmeasured:
        return rollouts, notes
    read: dict[str, tuple[str | None, ...]] = {}
    lengths: dict[str, float] = {}
    for step in sorted(rollouts.step.unique()):  # the texts of all steps can be larger than the memory
        for row in runs.arrow("SELECT traj_id, messages FROM transcripts WHERE step = ?", [int(step)]).to_pylist():
            text = "\n".join(own_texts(row["messages"]))
            lengths[row["traj_id"]] = len(text) / 4
            if wanted:
                read[row["traj_id"]] = tuple(reader(text) for reader in _READERS)
    if unmeasured:
        rollouts = rollouts.assign(response_tokens=rollouts.traj_id.map(lengths))
        notes.append("lengths of responses are estimated as a quarter of their characters")
    found = pd.DataFrame.from_dict(read, orient="index").reindex(rollouts.traj_id).set_axis(rollouts.index)
    counts = found.notna().sum()
    if not counts.sum():
        return rollouts, notes
    answers = found.iloc[:, next(i for i, count in enumerate(counts) if 2 * count >= counts.max())]
    same = pd.Series(map(_same, answers, truths, rollouts.reward), index=answers.index, dtype=bool)
    if left := answers.isna().sum():
        notes.append(f"no answer was found in the texts of {left:,} of {len(answers):,} rollouts")
    return rollouts.assign(answer=answers.mask(same, truths), truth=truths), notes


def _in_tags(text: str) -> str | None:
    _, tag, content = text.rpartition("</answer>")[0].rpartition("<answer>")
    return content.strip()[:LONGEST] or None if tag else None


def _after_hashes(text: str) -> str | None:
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0][:LONGEST] or None if mark else None


_READERS: tuple[Callable[[str], str | None], ...] = (extract_answer, last_boxed, _in_tags, _after_hashes)


def _short(truth: object) -> str | None:
    """Return the answer of a true solution; None if the text holds none."""
    text = str(truth)
    if (boxed := last_boxed(text)) is not None:
        return boxed
    text = _after_hashes(text) or text.strip()
    return text if len(text) <= LONGEST else None


def _same(answer: object, truth: object, reward: float) -> bool:
    if not isinstance(answer, str) or not isinstance(truth, str):
        return False
    decided = quick(answer, truth) if max(len(answer), len(truth)) <= LONGEST else None
    return decided if decided is not None else reward > 0 and not re.search(HEDGE, answer)
