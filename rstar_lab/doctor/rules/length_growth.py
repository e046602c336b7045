"""Responses become much longer."""

from rstar_lab.doctor.rule import Evidence, Log, at_steps, first, rule


@rule(
    "length growth",
    reads=("steps.response_tokens",),
    cause="responses have become much longer; compute per step grows and rollouts end at the limit",
    remedy=(
        "check whether length pays: compare rewards of short and long rollouts, and use the aggregation `seq-"
        "mean-token-sum-norm`"
    ),
    source="Liu et al. 2025 (Dr. GRPO), arXiv 2503.20783",
)
def check(log: Log) -> Evidence | None:
    values = log.steps.response_tokens
    text = "{last:.0f} tokens per response, {first:.0f} in the first steps"
    return at_steps(log, values, values > 3 * first(values), text, cost=0.3)
