"""Every group of the last steps has only successful rollouts: the advantages are 0."""

from rstar_lab.doctor.rule import Evidence, Log, groups_where, rule


@rule(
    "all rollouts right",
    reads=("rollouts.reward", "rollouts.group_id"),
    cause=(
        "nearly every rollout gets the full reward, so nearly no group has an advantage: the problems are too "
        "easy, or the grader accepts everything"
    ),
    remedy=(
        "draw harder problems (`filter: {drop_from: 1.0}`, `rl.retire_from`), and check the grader with wrong answers"
    ),
    source="rStar2-Agent, arXiv 2508.20722, stage 3; DAPO, arXiv 2503.14476",
)
def check(log: Log) -> Evidence | None:
    late = log.last()
    best = late.reward.max()
    if not best > 0:
        return None
    return groups_where(late, late.groupby("group_id").reward.min() >= best, f"all rollouts have the reward {best:g}")
