"""The reward falls."""

from rstar_lab.doctor.rule import Evidence, Log, change, rule


@rule(
    "the reward collapses",
    reads=("steps.reward",),
    cause=(
        "the policy has become worse than at the start: the updates are too large, or they follow a wrong advantage"
    ),
    remedy=(
        "lower the learning rate, check the sign of advantages and the importance ratios, and continue from a "
        "checkpoint before the fall (`rstar-lab rewind`)"
    ),
    source="arXiv 2606.26027",
)
def check(log: Log) -> Evidence | None:
    rewards = log.steps.reward.dropna()
    if len(rewards) < 6:
        return None
    difference, low, high = change(rewards, 0.99)
    third = len(rewards) // 3
    start, last = float(rewards.head(third).mean()), rewards.tail(third)
    fallen = third >= 3 and last.max() < 0.25 * rewards.head(2).mean()  # within the first third, too
    if rewards.head(2).mean() < 0.05 or not (fallen or (high < 0 and difference < -0.4 * start)):
        return None
    text = f"mean reward {start:.3f} in the first third, {last.mean():.3f} in the last: {difference:+.3f} [{low:+.3f}, {high:+.3f}] (99%)"
    steps = log.steps.step[last.index].astype(int).tolist()
    return Evidence(text, {"first": start, "last": float(last.mean()), "low": low, "high": high}, steps, (), 0.9)
