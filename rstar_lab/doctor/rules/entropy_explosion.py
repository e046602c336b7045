"""The entropy grows far above its first value."""

from rstar_lab.doctor.rule import Evidence, Log, at_steps, first, rule


@rule(
    "entropy explosion",
    reads=("steps.entropy",),
    cause="the policy drifts towards random text",
    remedy="lower the learning rate, and check that the advantages are not dominated by negative ones",
    source="arXiv 2606.26027",
)
def check(log: Log) -> Evidence | None:
    values = log.steps.entropy
    high = (values > 4 * first(values)) & (values > 0.5)
    return at_steps(log, values, high, "entropy {last:.3g} nats per token, {first:.3g} in the first steps", cost=0.6)
