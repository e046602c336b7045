"""A large share of the tokens is clipped."""

from rstar_lab.doctor.rule import Evidence, Log, at_steps, rule


@rule(
    "clipping of most tokens",
    reads=("steps.clip_share",),
    cause=(
        "a large share of the tokens is outside of the clip range: the updates use rollouts that are too old, or "
        "the step is too large"
    ),
    remedy="use fewer mini-batches, a smaller learning rate or fresher rollouts (`max_staleness`)",
    source="Schulman et al. 2017, arXiv 1707.06347",
)
def check(log: Log) -> Evidence | None:
    values = log.steps.clip_share
    return at_steps(log, values, values > 0.3, "{last:.0%} of the tokens are clipped", cost=0.4)
