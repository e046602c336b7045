"""Rollouts without an end get the reward."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, examples, percent, share


def check(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rollouts.truncated.notna() & (log.rollouts.reward > 0)]
    if len(rows) < 20:
        return None
    cut = rows.truncated.astype(bool)
    value = share(cut, rows)
    if value[1] < 0.03:
        return None
    text = f"{percent(value)} of the {len(rows)} rewarded rollouts were cut off"
    return Evidence(text, {"share": value[0], "low": value[1]}, (), examples(rows[cut]), 0.6)


RULE = Rule(
    name="truncated rollouts are rewarded",
    reads=("rollouts.truncated", "rollouts.reward"),
    cause="rollouts that were cut off get a reward: the grader reads an answer from unfinished reasoning",
    remedy="read the answer from the answer tags only (`rl.answer: tagged`), or give no reward to truncated rollouts",
    source="trl #4976",
    check=check,
)
