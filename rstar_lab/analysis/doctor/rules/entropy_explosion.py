"""The entropy grows far above its first value."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, steps_where


def check(log: Log) -> Evidence | None:
    values = log.steps.entropy
    first = float(values.dropna().head(3).median())
    hit = steps_where(log, (values > 4 * first) & (values > 0.5))
    if len(hit) < 2:
        return None
    value = float(values[log.steps.step.isin(hit)].iloc[-1])
    text = f"entropy {value:.3g} nats per token, {value / max(first, 1e-9):.1f} times the first steps"
    return Evidence(text, {"value": value, "first": first}, hit, (), 0.6)


RULE = Rule(
    name="entropy explosion",
    reads=("steps.entropy",),
    cause="the policy drifts towards random text",
    remedy="lower the learning rate, and check that the advantages are not dominated by negative ones",
    source="arXiv 2606.26027",
    check=check,
)
