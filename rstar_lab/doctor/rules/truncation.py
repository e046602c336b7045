"""Most rollouts end at a limit."""

from rstar_lab.doctor.rule import Evidence, Log, among, rule


@rule(
    "truncation",
    reads=("rollouts.truncated",),
    cause="most rollouts end at a limit of tokens or turns: they cannot give an answer",
    remedy="raise `rl.limits.max_response_tokens` or `max_turns`, or start with easier problems",
    source="rStar2-Agent, arXiv 2508.20722, stages",
)
def check(log: Log) -> Evidence | None:
    late = log.last()
    late = late[late.truncated.notna()]
    return among(late, late.truncated.astype(bool), "rollouts of the last steps end at a limit", above=0.3)
