"""Numeric answers that differ from the true one get the reward."""

import pandas as pd

from rstar_lab.doctor.rule import HEDGE, Evidence, Log, among, rule


@rule(
    "wrong answers are rewarded",
    reads=("rollouts.answer", "rollouts.truth", "rollouts.reward"),
    cause=(
        "rollouts whose answer differs from the true one get the reward: the grader accepts wrong answers, hedges"
        " or text around a number"
    ),
    remedy=(
        "read the named rollouts; grade again with `rstar-lab rescore`; test the reward with wrong and hedged "
        "answers before training"
    ),
    source="Math-Verify #82; Gao et al. 2023, arXiv 2210.10760",
)
def check(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rollouts.answer.notna() & log.rollouts.truth.notna() & log.rewarded]
    answers, truths = _number(rows.answer), _number(rows.truth)
    hedged = rows.answer.astype(str).str.contains(HEDGE, regex=True) & truths.notna()
    wrong = (answers.notna() & truths.notna() & ((answers - truths).abs() > 1e-6 * truths.abs().clip(lower=1))) | hedged
    known = answers.notna() & truths.notna() | hedged
    what = "rewarded rollouts with a numeric truth have another answer or a hedge"
    return among(rows[known], wrong[known], what, above=0.01)


def _number(texts: pd.Series) -> pd.Series:
    plain = texts.astype(str).str.replace(r"[\s$,]|\\\\,", "", regex=True).str.rstrip(".")
    return pd.to_numeric(plain, errors="coerce")
