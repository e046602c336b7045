"""Responses become much shorter."""

from rstar_lab.doctor.rule import Evidence, Log, at_steps, first, rule


@rule(
    "length collapse",
    reads=("steps.response_tokens",),
    cause="responses have become much shorter: the policy skips its reasoning or its tool calls",
    remedy="look at the shortest rewarded rollouts; check length penalties and `overlong_buffer`",
    source="DAPO, arXiv 2503.14476",
)
def check(log: Log) -> Evidence | None:
    values = log.steps.response_tokens
    text = "{last:.0f} tokens per response, {first:.0f} in the first steps"
    return at_steps(log, values, values < 0.4 * first(values), text, cost=0.5)
