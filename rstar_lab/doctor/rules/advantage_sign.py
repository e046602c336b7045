"""Rewarded rollouts have negative advantages."""

import numpy as np

from rstar_lab.doctor.rule import Evidence, Log, among, rule


@rule(
    "advantages have the wrong sign",
    reads=("rollouts.advantage", "rollouts.reward"),
    cause="rollouts with a higher reward than their group have a lower advantage: the update makes them less likely",
    remedy="check the sign of your advantage function and of the loss",
    source="REINFORCE, Williams 1992",
)
def check(log: Log) -> Evidence | None:
    rows = log.rollouts.dropna(subset=["advantage", "reward"])
    centred = rows.reward - rows.groupby("group_id").reward.transform("mean")
    known = (centred.abs() > 1e-6) & (rows.advantage.abs() > 1e-9)
    wrong = np.sign(centred[known]) != np.sign(rows.advantage[known])
    what = "advantages have the opposite sign of reward minus group mean"
    return among(rows[known], wrong, what, above=0.3, least=50, cost=1.0)
