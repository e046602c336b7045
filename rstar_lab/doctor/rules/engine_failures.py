"""Requests to the engines fail."""

from rstar_lab.doctor.rule import Evidence, Log, ended_with, rule


@rule(
    "requests to engines fail",
    reads=("rollouts.stop_reason",),
    cause=(
        "requests to an engine fail again and again: an engine is dead, or out of memory, and its groups lose their "
        "rollouts"
    ),
    remedy=(
        "look at the logs of the engines; restart the dead one, and lower `engine.max_num_seqs` if it ran out of memory"
    ),
    source="NeMo-RL #3163",
)
def check(log: Log) -> Evidence | None:
    return ended_with(log, "ended because an engine failed", "engine_error")
