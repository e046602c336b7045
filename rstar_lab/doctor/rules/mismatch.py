"""The log-probs of engine and trainer differ."""

from rstar_lab.doctor.rule import Evidence, Log, at_steps, rule


@rule(
    "engine and trainer disagree",
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
)
def check(log: Log) -> Evidence | None:
    values = log.steps.mismatch
    high = values > (FP32_LIMIT if log.fp32 else LIMIT)
    text = "mean difference {last:.3g} nats per token, {first:.3g} in the first steps"
    return at_steps(log, values, high, text, least=1 if len(values) < 3 else 2, cost=0.8)


LIMIT, FP32_LIMIT = 0.05, 1e-3  # nats per token
