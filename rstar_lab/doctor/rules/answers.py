"""Rules over the answers of rollouts, their true answers and their rewards."""

import numpy as np
import pandas as pd

from rstar_lab.common.estimates import format_interval, mean_difference
from rstar_lab.doctor.answers import plain_text
from rstar_lab.doctor.rule import LEVEL, Evidence, Log, among, examples
from rstar_lab.doctor.rules.groups import NOT_SCORED


def _no_answer(log: Log) -> pd.Series:
    """Whether a rollout gives no answer, neither in its text nor in the call that ends it."""
    rows = log.rollouts
    return (rows.answer.isna() | (rows.answer.astype(str).str.strip() == "")) & (rows.ending != "tool")


def wrong_is_rewarded(log: Log) -> Evidence | None:
    rows = log.rollouts[log.right.notna() & log.rewarded]
    wrong = log.right[rows.index] == False  # noqa: E712  an object column with None
    return among(rows, wrong, "rewarded rollouts with a known truth have another answer or a hedge", above=0.01)


def right_is_not_rewarded(log: Log) -> Evidence | None:
    rows = log.rollouts[(log.right == True) & log.rollouts.reward.notna()]  # noqa: E712
    low = ~log.rewarded[rows.index] & ((rows.reward <= 0) | (log.rollouts.reward.nunique() == 2))
    return among(rows, low, "rollouts whose answer equals the true one have no reward", above=0.01, least=5)


def rewarded_without_answer(log: Log) -> Evidence | None:
    """Rewarded rollouts without an answer, in a log where most rewarded rollouts have one."""
    rows = log.rollouts[log.rewarded]
    without = _no_answer(log)[rows.index]
    if without.mean() > 0.6:  # the format of the answers is not known
        return None
    what, cost = "rewarded rollouts have no answer", min(1.0, 2 * float(without.mean()))
    return among(rows, without, what, above=0.02, cost=cost)


def candidates_are_rewarded(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rewarded & log.rollouts.candidates.notna()]
    return among(rows, rows.candidates >= 3, "rewarded rollouts name three or more different answers", above=0.01)


def unfinished(log: Log) -> Evidence | None:
    """Rollouts that end where others go on, without a reward, in a log in which answers are given in the last turn."""
    rows = log.rollouts
    cut = rows.truncated.fillna(False).astype(bool) | rows.stop_reason.isin(NOT_SCORED)
    ended = (rows.ending == "unfinished") & ~cut
    if log.rewarded[ended].mean() > 0.02 or _no_answer(log)[rows.ending == "model"].mean() > 0.5:
        return None
    return among(rows, ended, "rollouts end with the output of a tool after which others go on", above=0.02)


def same_answer_other_reward(log: Log) -> Evidence | None:
    """Rollouts of one problem with the same answer have the same reward, if the reward is for the answer."""
    rows = log.rollouts[~_no_answer(log) & log.rollouts.reward.notna()]
    rows = rows.assign(high=log.rewarded[rows.index].astype(float), plain=rows.answer.map(plain_text))
    rows = rows[rows.plain.str.fullmatch(r"[-+]?\d[\d./]*")]  # "done" says nothing
    if rows.reward.nunique() != 2 or (rows.groupby("group_id").reward.nunique() > 1).mean() < 0.1:
        return None
    by = rows.groupby(["problem_id", "plain"]).high
    size, rate = by.transform("size"), by.transform("mean")
    rows = rows[size >= 2]
    equal = rate[rows.index].where(rows.high > 0, 1 - rate[rows.index])  # share of equal answers with the same reward
    minority = (equal < 1) & (equal <= 0.5 + 1e-9)
    what = "rollouts have another reward than half of those with the same answer to the same problem"
    return among(rows, minority, what, above=0.15, least=50, cost=0.8)


def answers_in_another_format(log: Log) -> Evidence | None:
    late = log.last()
    late = late[late.truncated.notna() & ~late.truncated.fillna(True).astype(bool)]
    without = _no_answer(log)[late.index] & (late.reward <= 0)
    return among(late, without, "finished rollouts of the last steps have no answer", above=0.35)


def true_answers_look_wrong(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rollouts.answer.notna() & log.rollouts.truth.notna()]
    answers, truths = rows.answer.map(plain_text), rows.truth.map(plain_text)
    size = rows.groupby("problem_id").answer.transform("size")
    known = log.right[rows.index].notna() | answers.str.fullmatch(r"\w{1,20}")  # words that are no formula
    rows, answers, truths = rows[known], answers[known], truths[known]
    if truths.nunique() < 10:  # with few possible answers, such as A to D, rollouts agree on wrong ones
        return None
    right = log.right[rows.index] == True  # noqa: E712  an object column with None
    answers = answers.where(~right, truths)
    same = answers.groupby([rows.problem_id, answers]).transform("size")
    # One row per problem: an answer that at least three rollouts and half of those of the problem give.
    agreed = rows[(same >= 3) & (same >= 0.5 * size[rows.index])].drop_duplicates("problem_id")
    # A hard problem is solved by some rollouts. If its true answer is wrong, by none.
    solved = right.groupby(rows.problem_id).transform("any")[agreed.index]
    # One answer to most problems is that of a policy that ignores the question.
    agreed = agreed[answers[agreed.index].map(answers[agreed.index].value_counts(normalize=True)) < 0.5]
    # A model that errs agrees less with itself than where it is right; where the true answer is wrong, as much.
    agreement = (same / size)[agreed.index]
    agreed = agreed[~(agreement < agreement[solved].quantile(0.25))]
    what = "problems on whose answer most rollouts agree have another true answer, which no rollout gives"
    return among(agreed, ~solved[agreed.index], what, above=0.05, least=15, cost=0.6)


def truncation(log: Log) -> Evidence | None:
    late = log.last().dropna(subset=["truncated"])
    return among(late, late.truncated.astype(bool), "rollouts of the last steps end at a limit", above=0.3)


def truncation_jumps(log: Log) -> Evidence | None:
    """Find the update of a stage from which on far more rollouts are truncated than before it: three steps on either side."""
    rows = log.rollouts.dropna(subset=["truncated"]).astype({"truncated": float})
    found = None
    for _, stage in rows.groupby("stage", dropna=False):
        shares = [own.groupby("group_id").truncated.mean().to_numpy() for _, own in stage.groupby("step")]
        for place in range(1, len(shares)):
            sides = [np.concatenate(shares[max(0, place - 3) : place]), np.concatenate(shares[place : place + 3])]
            low = mean_difference(*sides, level=1 - (1 - LEVEL) / len(shares))[1]
            if low > (found[0] if found else 0.1):
                found = low, sides, sorted(stage.step.unique().astype(int))[place - 1 : place + 3]
    if found is None:
        return None
    _, sides, steps = found
    rise, (before, after) = mean_difference(*sides), (side.mean() for side in sides)
    text = f"the share of truncated rollouts rose from {before:.0%} to {after:.0%} between steps {steps[0]} and {steps[1]}, "
    text += f"by {format_interval(rise, '.0%')}"
    cut = rows[rows.step.isin(steps[1:]) & (rows.truncated > 0)]
    return Evidence(text, dict(zip(("rise", "low", "high"), rise, strict=True)), steps, examples(cut), 1.0)


def truncated_is_rewarded(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rollouts.truncated.notna() & log.rewarded]
    return among(rows, rows.truncated.astype(bool), "rewarded rollouts were cut off", above=0.02, cost=0.6)
