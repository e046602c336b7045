"""The entropy falls to a fraction of its first value."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, steps_where


def check(log: Log) -> Evidence | None:
    values = log.steps.entropy
    first = float(values.dropna().head(3).median())
    hit = steps_where(log, values < 0.15 * first)
    if len(hit) < 2:
        return None
    value = float(values[log.steps.step.isin(hit)].iloc[-1])
    text = f"entropy {value:.3g} nats per token, {value / max(first, 1e-9):.0%} of the first steps, at {len(hit)} steps"
    return Evidence(text, {"value": value, "first": first}, hit, (), 0.6)


RULE = Rule(
    name="entropy collapse",
    reads=("steps.entropy",),
    cause=(
        "the policy has become almost deterministic, so the rollouts of a group are nearly equal and exploration "
        "has ended"
    ),
    remedy="raise `clip_high`, lower the learning rate, or go back to a checkpoint before it (`rstar-lab rewind`)",
    source="Cui et al. 2025, arXiv 2505.22617",
    check=check,
)
