"""The reward falls."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, change


def check(log: Log) -> Evidence | None:
    rewards = log.steps.reward.dropna()
    third = len(rewards) // 3
    if third < 2:
        return None
    difference, low, high = change(rewards)
    first, last = rewards.head(2), rewards.tail(third)
    fallen = last.max() < 0.5 * first.min()
    if first.mean() < 0.05 or not (fallen or (high < 0 and difference < -0.5 * float(first.mean()))):
        return None
    text = f"mean reward {first.mean():.3f} in the first two steps, {last.mean():.3f} in the last {third} ({last.max():.3f} at most)"
    steps = log.steps.step[last.index].astype(int).tolist()
    return Evidence(
        text, {"first": float(first.mean()), "last": float(last.mean()), "low": low, "high": high}, steps, (), 0.9
    )


RULE = Rule(
    name="the reward collapses",
    reads=("steps.reward",),
    cause=(
        "the policy has become worse than at the start: the updates are too large, or they follow a wrong advantage"
    ),
    remedy=(
        "lower the learning rate, check the sign of advantages and the importance ratios, and continue from a "
        "checkpoint before the fall (`rstar-lab rewind`)"
    ),
    source="arXiv 2606.26027",
    check=check,
)
