"""Some importance ratios are very large."""

from rstar_lab.doctor.rule import Evidence, Log, at_steps, rule


@rule(
    "importance weights far from 1",
    reads=("steps.ratio_max",),
    cause="the importance ratios are far from 1, so single tokens dominate the update",
    remedy=(
        "use a correction (`rl.correction: {type: tis}`), and find out why the policies differ (precision, "
        "staleness, sampler)"
    ),
    source="Yao et al. 2025; arXiv 2510.26788",
)
def check(log: Log) -> Evidence | None:
    values = log.steps.ratio_max
    text = "the largest importance ratio is {last:.3g}"
    return at_steps(log, values, values > 1000, text, least=max(2, len(values) // 10), cost=0.4)
