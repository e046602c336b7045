"""Every group of the last steps has only failed rollouts: the advantages are 0."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, examples


def check(log: Log) -> Evidence | None:
    late = log.last()
    groups = late.groupby("group_id").reward.max()
    failed = float((groups <= 0).mean())
    if failed < 0.9:
        return None
    wrong = late[late.group_id.isin(groups[groups <= 0].index)]
    steps = sorted(late.step.unique().astype(int))
    text = f"{failed:.0%} of {len(groups)} groups in steps {steps[0]} to {steps[-1]} have no rewarded rollout"
    return Evidence(text, {"share": failed, "groups": len(groups)}, steps, examples(wrong), failed)


RULE = Rule(
    name="all rollouts wrong",
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
    check=check,
)
