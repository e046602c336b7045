"""Most rollouts end at a limit."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, examples, percent, share


def check(log: Log) -> Evidence | None:
    late = log.last()
    late = late[late.truncated.notna()]
    if late.empty:
        return None
    cut = late.truncated.astype(bool)
    value = share(cut, late)
    if value[0] < 0.5:
        return None
    text = f"{percent(value)} of the rollouts of the last steps end at a limit"
    return Evidence(text, {"share": value[0], "low": value[1], "high": value[2]}, (), examples(late[cut]), value[0])


RULE = Rule(
    name="truncation",
    reads=("rollouts.truncated",),
    cause="most rollouts end at a limit of tokens or turns: they cannot give an answer",
    remedy="raise `rl.limits.max_response_tokens` or `max_turns`, or start with easier problems",
    source="rStar2-Agent, arXiv 2508.20722, stages",
    check=check,
)
