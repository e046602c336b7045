"""One engine needs far longer per token."""

import numpy as np

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, examples


def check(log: Log) -> Evidence | None:
    used = log.rollouts.dropna(subset=["engine", "generate_s", "model_tokens"])
    sums = used.groupby("engine")[["generate_s", "model_tokens"]].sum()
    rates = (sums.generate_s / sums.model_tokens.replace(0, np.nan)).dropna().sort_values()
    if len(rates) < 2 or rates.iloc[-1] < 2.5 * rates.iloc[:-1].median():
        return None
    times = rates.iloc[-1] / rates.iloc[:-1].median()
    text = f"{rates.index[-1]} needs {times:.1f} times as long per token as the median of the other {len(rates) - 1}"
    return Evidence(text, {"times": float(times)}, (), examples(used[used.engine == rates.index[-1]]), 0.3)


RULE = Rule(
    name="an engine is slow",
    reads=("rollouts.engine", "rollouts.generate_s", "rollouts.model_tokens"),
    cause="one engine needs far longer per token than the others, and every step waits for it",
    remedy="look for other load on its GPU; restart it or leave it out",
    source="NeMo-RL #3402",
    check=check,
)
