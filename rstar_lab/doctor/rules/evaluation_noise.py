"""The last evaluation is above the first by less than their noise."""

from rstar_lab.doctor.rule import Evidence, Log, change, rule


@rule(
    "progress within noise",
    reads=("steps.held_out", "steps.reward"),
    cause="the held-out score moves up and down by more than it has risen: its progress is noise",
    remedy=(
        "evaluate more problems or more samples per problem, and compare with `rstar_lab.analysis.compare`, which"
        " gives the interval of the difference"
    ),
    source="Hochlehnert et al. 2025, arXiv 2504.07086",
)
def check(log: Log) -> Evidence | None:
    held_out = log.steps.held_out.dropna()
    if len(held_out) < 9:
        return None
    difference, low, high = change(held_out)
    best = float(held_out.max() - held_out.iloc[0])
    if not (best > 0.02 and low <= 0 and difference < 0.5 * best):
        return None
    text = (
        f"best held-out minus first: {best:+.3f}; last third minus first third: {difference:+.3f} [{low:+.3f}, "
        f"{high:+.3f}]"
    )
    return Evidence(text, {"best": best, "difference": difference, "low": low, "high": high}, (), (), 0.3)
