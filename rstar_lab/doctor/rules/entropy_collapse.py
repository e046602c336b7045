"""The entropy falls to a fraction of its first value."""

from rstar_lab.doctor.rule import Evidence, Log, at_steps, first, rule


@rule(
    "entropy collapse",
    reads=("steps.entropy",),
    cause=(
        "the policy has become almost deterministic, so the rollouts of a group are nearly equal and exploration "
        "has ended"
    ),
    remedy="raise `clip_high`, lower the learning rate, or go back to a checkpoint before it (`rstar-lab rewind`)",
    source="Cui et al. 2025, arXiv 2505.22617",
)
def check(log: Log) -> Evidence | None:
    values = log.steps.entropy
    low = (values < 0.15 * first(values)) & (values < 0.1)
    return at_steps(log, values, low, "entropy {last:.3g} nats per token, {first:.3g} in the first steps", cost=0.6)
