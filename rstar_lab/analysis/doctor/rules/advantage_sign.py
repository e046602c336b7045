"""Rewarded rollouts have negative advantages."""

import numpy as np

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, examples


def check(log: Log) -> Evidence | None:
    rows = log.rollouts.dropna(subset=["advantage", "reward"])
    centred = rows.reward - rows.groupby("group_id").reward.transform("mean")
    known = (centred.abs() > 1e-6) & (rows.advantage.abs() > 1e-9)
    if known.sum() < 50:
        return None
    wrong = np.sign(centred[known]) != np.sign(rows.advantage[known])
    if wrong.mean() < 0.5:
        return None
    text = f"{wrong.mean():.0%} of {int(known.sum())} advantages have the opposite sign of reward minus group mean"
    return Evidence(text, {"share": float(wrong.mean())}, (), examples(rows[known][wrong]), 1.0)


RULE = Rule(
    name="advantages have the wrong sign",
    reads=("rollouts.advantage", "rollouts.reward"),
    cause="rollouts with a higher reward than their group have a lower advantage: the update makes them less likely",
    remedy="check the sign of your advantage function and of the loss",
    source="REINFORCE, Williams 1992",
    check=check,
)
