"""Rollouts that write the true answer get no reward."""

from rstar_lab.doctor.rule import Evidence, Log, among, plain_answer, rule


@rule(
    "right answers get no reward",
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
)
def check(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rollouts.answer.notna() & log.rollouts.truth.notna() & log.rollouts.reward.notna()]
    right = rows[plain_answer(rows.answer) == plain_answer(rows.truth)]
    what = "rollouts whose answer equals the true one have no reward"
    return among(right, (right.reward <= 0) & ~log.rewarded[right.index], what, above=0.01, least=5)
