"""Rollouts without an end get the reward."""

from rstar_lab.doctor.rule import Evidence, Log, among, rule


@rule(
    "truncated rollouts are rewarded",
    reads=("rollouts.truncated", "rollouts.reward"),
    cause="rollouts that were cut off get a reward: the grader reads an answer from unfinished reasoning",
    remedy="read the answer from the answer tags only (`rl.answer: tagged`), or give no reward to truncated rollouts",
    source="trl #4976",
)
def check(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rollouts.truncated.notna() & log.rewarded]
    return among(rows, rows.truncated.astype(bool), "rewarded rollouts were cut off", above=0.02, cost=0.6)
