"""The reward does not rise over the run."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, change


def check(log: Log) -> Evidence | None:
    rewards = log.steps.reward.dropna()
    if len(rewards) < 9:
        return None
    difference, low, high = change(rewards)
    spread = max(float(rewards.max() - rewards.min()), 1e-9)
    if low > 0 or difference > 0.1 * max(abs(float(rewards.head(len(rewards) // 3).mean())), spread):
        return None
    text = (
        f"mean reward of the last third minus the first third: {difference:+.3f} [{low:+.3f}, {high:+.3f}] over "
        f"{len(rewards)} steps"
    )
    return Evidence(text, {"difference": difference, "low": low, "high": high}, (), (), 0.6)


RULE = Rule(
    name="no progress",
    reads=("steps.reward",),
    cause="the reward did not rise after the first third of the run",
    remedy=(
        "look at the share of groups that train and at the gradient norm; if both are healthy, raise the learning"
        " rate or train longer"
    ),
    source="Welch interval over steps",
    check=check,
)
