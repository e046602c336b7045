"""The reward does not rise over the run."""

from rstar_lab.doctor.rule import Evidence, Log, change, rule


@rule(
    "no progress",
    reads=("steps.reward",),
    cause="the reward did not rise after the first third of the run",
    remedy=(
        "look at the share of groups that train and at the gradient norm; if both are healthy, raise the learning"
        " rate or train longer"
    ),
    source="Welch interval over steps",
)
def check(log: Log) -> Evidence | None:
    rewards = log.steps.reward.dropna()
    if len(rewards) < 9:
        return None
    difference, low, high = change(rewards)
    # Equivalence: the interval shows that the change is small. A wide interval shows nothing.
    small = 0.1 * float(rewards.abs().mean())
    solved = log.has("rollouts.reward") and rewards.tail(len(rewards) // 3).mean() > 0.9 * log.rollouts.reward.max()
    if not (-small < low and high < small) or solved or not rewards.any():
        return None
    text = (
        f"mean reward of the last third minus the first third: {difference:+.3f} [{low:+.3f}, {high:+.3f}] over "
        f"{len(rewards)} steps, less than a tenth of the mean reward"
    )
    return Evidence(text, {"difference": difference, "low": low, "high": high}, (), (), 0.6)
