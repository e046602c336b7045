"""The reward falls."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, change


def check(log: Log) -> Evidence | None:
    rewards = log.steps.reward.dropna()
    if len(rewards) < 9:
        return None
    difference, low, high = change(rewards)
    first = float(rewards.head(len(rewards) // 3).mean())
    if not (high < 0 and first > 0.05 and difference < -0.5 * first):
        return None
    text = f"mean reward of the last third minus the first third: {difference:+.3f} [{low:+.3f}, {high:+.3f}], from {first:.3f}"
    worst = log.steps.step[rewards.index].tail(len(rewards) // 3).astype(int).tolist()
    return Evidence(text, {"difference": difference, "low": low, "high": high, "first": first}, worst, (), 0.9)


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
