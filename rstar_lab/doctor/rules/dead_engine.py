"""One engine stops generating."""

from rstar_lab.doctor.rule import Evidence, Log, rule


@rule(
    "an engine produces nothing",
    reads=("rollouts.engine",),
    cause="an engine has generated nothing since a step, so the others do its work",
    remedy="look at its log and restart it; the same command resumes the run",
    source="NeMo-RL #3163",
)
def check(log: Log) -> Evidence | None:
    used = log.rollouts.dropna(subset=["engine"])
    steps = sorted(used.step.unique())
    if len(steps) < 4 or used.engine.nunique() < 2:
        return None
    shares = used[used.step.isin(steps[: len(steps) // 2])].engine.value_counts(normalize=True)
    late = used[used.step.isin(steps[-2:])]
    # An engine that still worked would miss all of these rollouts with a probability below exp(-7) = 0.001.
    gone = sorted(set(shares.index[shares * len(late) > 7]) - set(late.engine))
    if not gone:
        return None
    last = int(used[used.engine == gone[0]].step.max())
    text = f"{', '.join(map(str, gone))} generated nothing after step {last}; {late.engine.nunique()} of {len(shares)} engines work"
    return Evidence(text, {"lost": len(gone)}, [last], (), len(gone) / len(shares))
