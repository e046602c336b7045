"""Add columns to a table of failed rollouts, to group by: the first token that differs from a correct rollout of the same
group, and the phrase of the reasoning that is most typical of failures."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rstar_lab.analysis.runs import Runs
from rstar_lab.runs.errors import RunStoreError
from rstar_lab.runs.messages import read_messages
from rstar_lab.tool_calls import parse_stored_turn

END, TOOL = "(end of the rollout)", "(tool response)"
_MARKUP = re.compile(r"</?\w+>")
_WORD = re.compile(r"[^\W\d_]+|\d+")
_COUNTED = 5000  # maximum number of failed and of other rollouts whose phrases are counted
_MOST_PHRASES = 500
_MIN_Z = 1.96  # z-score of a phrase: log-odds ratio divided by its standard deviation
_MIN_ROLLOUTS = 5


def add_first_difference(runs: Runs, found: pd.DataFrame) -> pd.DataFrame:
    """Return `failed_rollouts` with the columns sibling, position, token and correct_token.

    sibling: traj_id of the correct rollout of the same group that has the most leading response tokens in common.
    position: the first response token that differs from it, from 0. token, correct_token: text of that token in the rollout
    and in the sibling, with visible blanks; `(tool response)` if a tool wrote it, `(end of the rollout)` if there is
    none. Without a correct sibling or token arrays, the texts are empty and position is missing.
    """
    columns: dict[str, dict[str, Any]] = {name: {} for name in ("sibling", "position", "token", "correct_token")}
    for key, part in found.groupby(["run_id", "step"]):
        run_id, step = str(key[0]), int(str(key[1]))
        failed = set(part.traj_id)
        for rollouts in _groups(runs, run_id, step):
            correct = [row for row in rollouts if row["reward"] > 0 and row["traj_id"] not in failed]
            if not correct:
                continue
            longest = max(len(row["ids"]) for row in correct)
            ids = np.full((len(correct), longest), -1, np.int64)  # -1: after the end
            for line, row in zip(ids, correct, strict=True):
                line[: len(row["ids"])] = row["ids"]
            for row in rollouts:
                if row["traj_id"] not in failed:
                    continue
                number, position = _first_difference(row["ids"], ids)
                sibling = correct[number]
                values = (
                    sibling["traj_id"],
                    position,
                    *(_text(runs, run_id, r, position) for r in (row, sibling)),
                )
                for name, value in zip(columns, values, strict=True):
                    columns[name][row["traj_id"]] = value
    result = found.copy()
    for name, texts in columns.items():
        column = found.traj_id.map(texts).astype(object)
        result[name] = column.astype("Int64") if name == "position" else column.fillna("").astype(str)
    return result


def add_phrases(runs: Runs, found: pd.DataFrame, *, words: int = 3) -> pd.DataFrame:
    """Return `failed_rollouts` with the columns phrase and z.

    phrase: the sequence of `words` words in the model's text outside of tool calls that is most typical of failures, among
    those in the rollout; punctuation and tags are ignored, numbers are replaced by N. Empty if the rollout has none with z of
    at least 1.96. z: log-odds ratio of the share of failed rollouts with the phrase to the share of other rollouts of the
    same runs, divided by its standard deviation, with an informative Dirichlet prior (Monroe, Colaresi and Quinn 2008,
    equations 15 to 22).

    The phrases are counted in at most 5,000 failed and 5,000 other rollouts, a fixed sample.
    Raises RunStoreError for words below 1.
    """
    if words < 1:
        raise RunStoreError(f"words must be at least 1, got {words}")
    run_ids = sorted(set(found.run_id))
    if not run_ids:
        return found.assign(phrase="", z=np.nan)
    failed = set(found.traj_id)
    marks = ", ".join("?" * len(run_ids))
    ids = runs.sql(
        f"SELECT run_id, step, traj_id FROM trajectories WHERE run_id IN ({marks}) ORDER BY hash(traj_id), traj_id",
        run_ids,
    )
    is_failed = ids.traj_id.isin(failed)
    counted = pd.concat([ids[is_failed].head(_COUNTED), ids[~is_failed].head(_COUNTED)])
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for traj_id, text in _texts(runs, counted):
        counts[traj_id in failed].update(_phrases(text, words))
    scores = _z_scores(counts[True], counts[False])
    chosen = {traj_id: _best(text, words, scores) for traj_id, text in _texts(runs, found)} if scores else {}
    phrase = found.traj_id.map(chosen).astype(object).fillna("").astype(str)
    return found.assign(phrase=phrase, z=phrase.map(scores))


def _groups(runs: Runs, run_id: str, step: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rollouts of each group of a step that have token arrays: traj_id, reward, ids, mask."""
    table = runs.arrow(
        "SELECT t.traj_id, t.group_id, coalesce(t.reward, 0) AS reward, x.response_ids, x.loss_mask FROM trajectories t "
        "JOIN transcripts x USING (run_id, step, traj_id) WHERE t.run_id = ? AND t.step = ? AND x.run_id = ? AND x.step = ? "
        "AND len(x.response_ids) > 0 ORDER BY t.group_id, t.sample",
        [run_id, step, run_id, step],
    )
    rows: list[dict[str, Any]] = []
    group = None
    ids, masks = table["response_ids"], table["loss_mask"]
    for number, (traj_id, group_id, reward) in enumerate(
        zip(*(table[name].to_pylist() for name in ("traj_id", "group_id", "reward")), strict=True)
    ):
        if group_id != group and rows:
            yield rows
            rows = []
        group = group_id
        mask = masks[number].values
        rows.append(
            {"traj_id": traj_id, "reward": reward, "ids": ids[number].values.to_numpy(zero_copy_only=False),
             "mask": None if mask is None else mask.to_numpy(zero_copy_only=False)}
        )  # fmt: skip
    if rows:
        yield rows


def _first_difference(ids: np.ndarray, others: np.ndarray) -> tuple[int, int]:
    """Return the row of `others` with the longest common prefix and its length. others: padded with -1."""
    size = min(len(ids), others.shape[1])
    differs = others[:, :size] != ids[:size]
    lengths = np.where(differs.any(axis=1), differs.argmax(axis=1), size)
    number = int(lengths.argmax())
    return number, int(lengths[number])


def _text(runs: Runs, run_id: str, row: dict[str, Any], position: int) -> str:
    if position >= len(row["ids"]):
        return END
    if row["mask"] is not None and not row["mask"][position]:
        return TOOL
    token = int(row["ids"][position])
    text = (runs.texts(run_id, [token]) or [None])[0]
    return f"token {token}" if text is None else text.replace("\n", "⏎").replace(" ", "␣")


def _texts(runs: Runs, rows: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield traj_id and the model's text outside of tool calls, for the rollouts that have a transcript."""
    for key, part in rows.groupby(["run_id", "step"]):
        run_id, step = str(key[0]), int(str(key[1]))
        wanted = set(part.traj_id)
        table = runs.arrow("SELECT traj_id, messages FROM transcripts WHERE run_id = ? AND step = ?", [run_id, step])
        for traj_id, messages in zip(table["traj_id"].to_pylist(), table["messages"].to_pylist(), strict=True):
            if traj_id in wanted:
                written = (m["content"] for m in read_messages(messages) if m["role"] == "assistant")
                yield traj_id, "\n".join(_MARKUP.sub("\n", parse_stored_turn(text).outside) for text in written)


def _phrases(text: str, words: int) -> set[str]:
    tokens: Sequence[str] = ["N" if word.isdigit() else word for word in _WORD.findall(text.lower())]
    return set(map(" ".join, zip(*(tokens[start:] for start in range(words)), strict=False)))


def _best(text: str, words: int, scores: dict[str, float]) -> str:
    return max(_phrases(text, words) & scores.keys(), key=lambda phrase: (scores[phrase], phrase), default="")


def _z_scores(failed: Counter[str], others: Counter[str]) -> dict[str, float]:
    """Return the z-score of the phrases that are more frequent in failed rollouts, at most _MOST_PHRASES."""
    names = [phrase for phrase, count in failed.items() if count >= _MIN_ROLLOUTS]
    a = np.array([failed[name] for name in names], float)
    b = np.array([others[name] for name in names], float)
    prior = a + b  # the informative prior: counts of the phrase in all rollouts
    total_a, total_b = float(failed.total()), float(others.total())
    total = total_a + total_b

    def log_odds(count: np.ndarray, size: float) -> np.ndarray:
        return np.log((count + prior) / (size + total - count - prior))

    z = (log_odds(a, total_a) - log_odds(b, total_b)) / np.sqrt(1 / (a + prior) + 1 / (b + prior))
    best = np.argsort(-z, kind="stable")[:_MOST_PHRASES]
    return {names[i]: float(z[i]) for i in best if z[i] >= _MIN_Z}
