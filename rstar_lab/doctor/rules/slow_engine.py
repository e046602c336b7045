"""One engine needs far longer per token."""

import numpy as np

from rstar_lab.doctor.rule import Evidence, Log, examples, rule


@rule(
    "an engine is slow",
    reads=("rollouts.engine", "rollouts.generate_s", "rollouts.model_tokens"),
    cause="one engine needs far longer per token than the others, and every step waits for it",
    remedy="look for other load on its GPU; restart it or leave it out",
    source="NeMo-RL #3402",
)
def check(log: Log) -> Evidence | None:
    used = log.rollouts.dropna(subset=["engine", "generate_s", "model_tokens"])
    sums = used.groupby(["step", "engine"])[["generate_s", "model_tokens"]].sum()
    rates = (sums.generate_s / sums.model_tokens.replace(0, np.nan)).unstack("engine").dropna(axis="columns", thresh=4)
    if rates.shape[1] < 2:
        return None
    slowest = rates.median().idxmax()
    times = (rates[slowest] / rates.drop(columns=slowest).median(axis="columns")).dropna()
    if len(times) < 4 or times.median() < 2 or (times > 1.5).mean() < 0.75:
        return None
    text = (
        f"{slowest} needs {times.median():.1f} times as long per token as the median of the other {rates.shape[1] - 1}, "
        f"and is slower in {(times > 1).mean():.0%} of {len(times)} steps"
    )
    return Evidence(text, {"times": float(times.median())}, (), examples(used[used.engine == slowest]), 0.3)
