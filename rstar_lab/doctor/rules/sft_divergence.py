"""The loss of SFT rises again."""

import numpy as np

from rstar_lab.doctor.rule import Evidence, Log, rule, steps_where
from rstar_lab.doctor.rules.sft_loss import sft_losses


@rule(
    "the SFT loss rises",
    reads=("steps.loss",),
    cause="updates of supervised training undo what was learnt: the learning rate is too large",
    remedy="lower the learning rate by a factor of 3 to 10, or use a warm-up",
    source="Goodfellow et al. 2016, Deep Learning, section 8.3.1 (learning rate)",
)
def check(log: Log) -> Evidence | None:
    losses = sft_losses(log)
    if len(losses) < 4:
        return None
    first, lowest = float(losses.iloc[0]), losses.cummin().shift()  # the lowest loss before each step
    risen = losses - lowest > 0.5 * first  # batches differ by less
    steps = steps_where(log, risen.reindex(log.steps.index))
    if len(steps) < 2:
        return None
    at = int(np.nanargmax(losses - lowest))
    low, high = float(lowest.iloc[at]), float(losses.iloc[at])
    text = f"the loss is {first:.3g} at first, {low:.3g} later, and then {high:.3g}; it has risen at {len(steps)} of {len(losses)} steps"
    return Evidence(text, {"first": first, "low": low, "high": high}, steps, (), 0.9)
