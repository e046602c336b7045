"""Environments fail."""

from rstar_lab.doctor.rule import Evidence, Log, ended_with, rule


@rule(
    "environments fail",
    reads=("rollouts.stop_reason",),
    cause="an environment fails in its reset or in a step, so its groups lose their rollouts",
    remedy="look at the error of the named rollouts; run the environment with a scripted policy before training",
    source="NeMo-Gym #2552",
)
def check(log: Log) -> Evidence | None:
    return ended_with(log, "ended with an error of their environment", "environment_error", "error")
