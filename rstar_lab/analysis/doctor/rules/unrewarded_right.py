"""Rollouts that write the true answer get no reward."""

import pandas as pd

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, examples, percent, share


def check(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rollouts.answer.notna() & log.rollouts.truth.notna() & log.rollouts.reward.notna()]
    if len(rows) < 20:
        return None
    same = _plain(rows.answer) == _plain(rows.truth)
    right = rows[same]
    if len(right) < 5:
        return None
    refused = right.reward <= 0
    value = share(refused, right)
    if value[1] < 0.02:
        return None
    text = f"{percent(value)} of the {len(right)} rollouts whose answer equals the true one have no reward"
    return Evidence(text, {"share": value[0], "low": value[1]}, (), examples(right[refused]), min(1.0, 2 * value[0]))


def _plain(answers: pd.Series) -> pd.Series:
    return answers.astype(str).str.replace(r"[\s$,]|\\\\boxed|[{}]", "", regex=True).str.rstrip(".").str.lower()


RULE = Rule(
    name="right answers get no reward",
    reads=("rollouts.answer", "rollouts.truth", "rollouts.reward"),
    cause=(
        "rollouts that give the true answer get no reward: the sign is wrong, or the grader does not recognise "
        "the notation"
    ),
    remedy=(
        "grade these rollouts again with `rstar-lab rescore`, and check the reward function with the true answers"
        " of the data"
    ),
    source="NeMo-Gym #1354",
    check=check,
)
