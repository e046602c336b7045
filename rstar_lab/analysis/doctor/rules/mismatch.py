"""The log-probs of engine and trainer differ."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, steps_where


def check(log: Log) -> Evidence | None:
    values = log.steps.mismatch
    first = float(values.dropna().head(3).median())
    limit = FP32_LIMIT if log.fp32 else LIMIT
    hit = steps_where(log, values > limit)
    if len(hit) < 1:
        return None
    value = float(values[log.steps.step.isin(hit)].iloc[-1])
    text = f"mean difference {value:.3g} nats per token at {len(hit)} steps, {first:.3g} in the first steps"
    return Evidence(text, {"value": value, "first": first}, hit, (), 0.8)


LIMIT, FP32_LIMIT = 0.05, 1e-3  # nats per token


RULE = Rule(
    name="engine and trainer disagree",
    reads=("steps.mismatch",),
    cause=(
        "engine and trainer compute different log-probs for the same tokens: weights or adapters were not "
        "delivered, another precision, or other sampling parameters"
    ),
    remedy=(
        "compare the engine with the checkpoint (`engine.mismatch_limit`); check weight sync, dtype, temperature "
        "and the prefix cache after each update"
    ),
    source="Yao et al. 2025, fengyao.notion.site/off-policy-rl; verl #7495",
    check=check,
)
