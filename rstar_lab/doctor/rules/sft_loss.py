"""The loss of SFT does not fall."""

import pandas as pd

from rstar_lab.doctor.rule import Evidence, Log, change, rule


@rule(
    "the SFT loss does not fall",
    reads=("steps.loss",),
    cause="the loss of supervised training stays where it began: the learning rate is far too small, or the labels are wrong",
    remedy=(
        "try learning rates of 1/10 and 10 times; check on one batch that the model can memorise it, and look at the "
        "mask of the labels"
    ),
    source="Karpathy 2019, A recipe for training neural networks",
)
def check(log: Log) -> Evidence | None:
    losses = sft_losses(log)
    difference, low, high = change(losses, 0.99)
    # Equivalence: the interval excludes that the loss has fallen by a tenth.
    if not low > -0.1 * losses.head(1).sum():
        return None
    text = f"mean loss of the last third minus the first third: {difference:+.3g} [{low:+.3g}, {high:+.3g}] over {len(losses)} values"
    return Evidence(
        text, {"first": float(losses.iloc[0]), "difference": difference, "low": low, "high": high}, (), (), 0.9
    )


def sft_losses(log: Log) -> pd.Series:
    """Return the losses of supervised training, by the index of `log.steps`; none of a log of RL."""
    losses = log.steps.loss.dropna()
    is_rl = len(log.rollouts) > 0 or log.has("steps.reward") or log.has("steps.clip_share")
    return losses.head(0) if is_rl else losses
