"""Some importance ratios are very large."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, steps_where


def check(log: Log) -> Evidence | None:
    values = log.steps.ratio_max
    hit = steps_where(log, values > 1000)
    if len(hit) < max(2, len(log.steps) // 10):
        return None
    text = f"the largest ratio is above 1,000 at {len(hit)} of {len(log.steps)} steps (up to {values.max():.3g})"
    return Evidence(text, {"largest": float(values.max())}, hit, (), 0.4)


RULE = Rule(
    name="importance weights far from 1",
    reads=("steps.ratio_max",),
    cause="the importance ratios are far from 1, so single tokens dominate the update",
    remedy=(
        "use a correction (`rl.correction: {type: tis}`), and find out why the policies differ (precision, "
        "staleness, sampler)"
    ),
    source="Yao et al. 2025; arXiv 2510.26788",
    check=check,
)
