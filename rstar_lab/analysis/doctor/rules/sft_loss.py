"""The loss of SFT does not fall."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule


def check(log: Log) -> Evidence | None:
    losses = log.steps.loss.dropna()
    if len(losses) < 4 or _is_rl(log):
        return None
    first, last = float(losses.head(1).iloc[0]), float(losses.tail(2).mean())
    if not last > 0.9 * first:
        return None
    text = f"the loss is {first:.3g} at the first logged step and {last:.3g} at the end ({len(losses)} values)"
    return Evidence(text, {"first": first, "last": last}, (), (), 0.9)


def _is_rl(log: Log) -> bool:
    return len(log.rollouts) > 0 or not log.missing(["steps.reward"]) or not log.missing(["steps.clip_share"])


RULE = Rule(
    name="the SFT loss does not fall",
    reads=("steps.loss",),
    cause=(
        "the loss of supervised training stays where it began: the learning rate is far too small or too large, or "
        "the labels are wrong"
    ),
    remedy=(
        "try learning rates of 1/10 and 10 times; check on one batch that the model can memorise it, and look at the "
        "mask of the labels"
    ),
    source="Karpathy 2019, A recipe for training neural networks",
    check=check,
)
