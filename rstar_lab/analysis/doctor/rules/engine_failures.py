"""Requests to the engines fail."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, examples


def check(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rollouts.stop_reason.notna()]
    failed = rows.stop_reason == "engine_error"
    if failed.sum() < 3 or failed.mean() < 0.01:
        return None
    steps = sorted(rows.step[failed].unique().astype(int))
    text = f"{int(failed.sum()):,} of {len(rows):,} rollouts ({failed.mean():.0%}) ended because an engine failed"
    return Evidence(text, {"share": float(failed.mean())}, steps, examples(rows[failed]), float(failed.mean()))


RULE = Rule(
    name="requests to engines fail",
    reads=("rollouts.stop_reason",),
    cause=(
        "requests to an engine fail again and again: an engine is dead, or out of memory, and its groups lose their "
        "rollouts"
    ),
    remedy=(
        "look at the logs of the engines; restart the dead one, and lower `engine.max_num_seqs` if it ran out of memory"
    ),
    source="NeMo-RL #3163",
    check=check,
)
