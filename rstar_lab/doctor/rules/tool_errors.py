"""Most calls of the model end in an error of the model."""

from rstar_lab.common.estimates import ratio
from rstar_lab.doctor.rule import LEVEL, Evidence, Log, examples, rule


@rule(
    "most tool calls fail",
    reads=("rollouts.calls", "rollouts.errors"),
    cause="most tool calls of the model fail",
    remedy=(
        "look at the commonest errors (`rstar_lab.analysis.failures`); teach the tool with SFT on executed "
        "examples; use RoC, which prefers clean rollouts"
    ),
    source="rStar2-Agent, arXiv 2508.20722, section 2.2.2",
)
def check(log: Log) -> Evidence | None:
    late = log.last()
    called = late[late.calls.fillna(0) > 0].dropna(subset=["errors"])
    by = called.groupby("problem_id")[["errors", "calls"]].sum().astype(float)
    rate = ratio(by.errors.to_numpy(), by.calls.to_numpy(), len(called), level=LEVEL)
    if not rate.low > 0.45:
        return None
    text = f"{rate.value:.0%} of the {int(by.calls.sum())} calls of the last steps fail"
    return Evidence(text, {"rate": rate.value, "low": rate.low}, (), examples(called[called.errors > 0]), 0.4)
