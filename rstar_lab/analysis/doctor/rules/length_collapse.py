"""Responses become much shorter."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, steps_where


def check(log: Log) -> Evidence | None:
    values = log.steps.response_tokens
    first = float(values.dropna().head(3).median())
    hit = steps_where(log, values < 0.4 * first)
    if len(hit) < 2:
        return None
    value = float(values[log.steps.step.isin(hit)].iloc[-1])
    text = f"{value:.0f} tokens per response, {value / max(first, 1e-9):.0%} of the first steps, at {len(hit)} steps"
    return Evidence(text, {"value": value, "first": first}, hit, (), 0.5)


RULE = Rule(
    name="length collapse",
    reads=("steps.response_tokens",),
    cause="responses have become much shorter: the policy skips its reasoning or its tool calls",
    remedy="look at the shortest rewarded rollouts; check length penalties and `overlong_buffer`",
    source="DAPO, arXiv 2503.14476",
    check=check,
)
