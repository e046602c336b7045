"""A large share of the tokens is clipped."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, steps_where


def check(log: Log) -> Evidence | None:
    values = log.steps.clip_share
    first = float(values.dropna().head(3).median())
    hit = steps_where(log, values > 0.3)
    if len(hit) < 2:
        return None
    value = float(values[log.steps.step.isin(hit)].iloc[-1])
    text = f"{value:.0%} of the tokens are clipped at {len(hit)} steps"
    return Evidence(text, {"value": value, "first": first}, hit, (), 0.4)


RULE = Rule(
    name="clipping of most tokens",
    reads=("steps.clip_share",),
    cause=(
        "a large share of the tokens is outside of the clip range: the updates use rollouts that are too old, or "
        "the step is too large"
    ),
    remedy="use fewer mini-batches, a smaller learning rate or fresher rollouts (`max_staleness`)",
    source="Schulman et al. 2017, arXiv 1707.06347",
    check=check,
)
