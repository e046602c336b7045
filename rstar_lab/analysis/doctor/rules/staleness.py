"""The rollouts come from weights of many updates ago."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, steps_where


def check(log: Log) -> Evidence | None:
    hit = steps_where(log, log.steps.staleness > 4)
    if len(hit) < 2:
        return None
    text = f"mean staleness above 4 updates at {len(hit)} steps (up to {log.steps.staleness.max():.1f})"
    return Evidence(text, {"largest": float(log.steps.staleness.max())}, hit, (), 0.3)


RULE = Rule(
    name="rollouts are old",
    reads=("steps.staleness",),
    cause="the rollouts come from weights of many updates ago",
    remedy="lower `max_staleness`, or use a correction; see docs/async.md",
    source="AReaL, arXiv 2505.24298",
    check=check,
)
