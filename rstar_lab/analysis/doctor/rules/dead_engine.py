"""One engine stops generating."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule


def check(log: Log) -> Evidence | None:
    used = log.rollouts.dropna(subset=["engine"])
    steps = sorted(used.step.unique())
    early, late = (
        set(used[used.step.isin(steps[: len(steps) // 2])].engine),
        set(used[used.step.isin(steps[-2:])].engine),
    )
    gone = sorted(early - late)
    if len(steps) < 4 or len(early) < 2 or not gone:
        return None
    last = int(used[used.engine == gone[0]].step.max())
    text = f"{', '.join(map(str, gone))} generated nothing after step {last}; {len(late)} of {len(early)} engines work"
    return Evidence(text, {"lost": len(gone)}, [last], (), len(gone) / len(early))


RULE = Rule(
    name="an engine produces nothing",
    reads=("rollouts.engine",),
    cause="an engine has generated nothing since a step, so the others do its work",
    remedy="look at its log and restart it; the same command resumes the run",
    source="NeMo-RL #3163",
    check=check,
)
