"""Most calls of the model end in an error of the model."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, examples


def check(log: Log) -> Evidence | None:
    late = log.last()
    called = late[late.calls.fillna(0) > 0]
    if called.calls.sum() < 50:
        return None
    rate = float(called.errors.sum() / called.calls.sum())
    if rate < 0.6:
        return None
    text = f"{rate:.0%} of the {int(called.calls.sum())} calls of the last steps fail"
    return Evidence(text, {"rate": rate}, (), examples(called[called.errors > 0]), 0.4)


RULE = Rule(
    name="most tool calls fail",
    reads=("rollouts.calls", "rollouts.errors"),
    cause="most tool calls of the model fail",
    remedy=(
        "look at the commonest errors (`rstar_lab.analysis.failures`); teach the tool with SFT on executed "
        "examples; use RoC, which prefers clean rollouts"
    ),
    source="rStar2-Agent, arXiv 2508.20722, section 3.2",
    check=check,
)
