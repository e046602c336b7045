"""Every group of the last steps has only failed rollouts: the advantages are 0."""

from rstar_lab.doctor.rule import Evidence, Log, groups_where, rule


@rule(
    "all rollouts wrong",
    reads=("rollouts.reward", "rollouts.group_id"),
    cause=(
        "nearly no rollout gets a reward, so nearly no group has an advantage: the problems are too hard for this"
        " policy, or right answers are not recognised"
    ),
    remedy=(
        "sample the first policy with `rstar-lab evaluate`; if pass@16 is 0, train on easier problems or run SFT "
        "first; if the answers look right, check the grader with `rescore`"
    ),
    source="Yu et al. 2025 (DAPO), arXiv 2503.14476, section 3.2",
)
def check(log: Log) -> Evidence | None:
    late = log.last().dropna(subset=["reward"])
    rewards = late.groupby("group_id").reward
    wrong = (rewards.max() <= 0) & (rewards.min() == rewards.max())  # different rewards below 0 are a signal
    return groups_where(late, wrong, "no rollout is rewarded")
