"""Responses become much longer."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, steps_where


def check(log: Log) -> Evidence | None:
    values = log.steps.response_tokens
    first = float(values.dropna().head(3).median())
    hit = steps_where(log, values > 3 * first)
    if len(hit) < 2:
        return None
    value = float(values[log.steps.step.isin(hit)].iloc[-1])
    text = f"{value:.0f} tokens per response, {value / max(first, 1e-9):.1f} times the first steps, at {len(hit)} steps"
    return Evidence(text, {"value": value, "first": first}, hit, (), 0.3)


RULE = Rule(
    name="length growth",
    reads=("steps.response_tokens",),
    cause="responses have become much longer; compute per step grows and rollouts end at the limit",
    remedy=(
        "check whether length pays: compare rewards of short and long rollouts, and use the aggregation `seq-"
        "mean-token-sum-norm`"
    ),
    source="Liu et al. 2025 (Dr. GRPO), arXiv 2503.20783",
    check=check,
)
