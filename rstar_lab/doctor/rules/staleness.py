"""The rollouts come from weights of many updates ago."""

from rstar_lab.doctor.rule import Evidence, Log, at_steps, rule


@rule(
    "rollouts are old",
    reads=("steps.staleness",),
    cause="the rollouts come from weights of many updates ago",
    remedy="lower `max_staleness`, or use a correction; see docs/async.md",
    source="AReaL, arXiv 2505.24298",
)
def check(log: Log) -> Evidence | None:
    values = log.steps.staleness
    return at_steps(log, values, values > 4, "the rollouts are {last:.1f} updates old on average", cost=0.3)
