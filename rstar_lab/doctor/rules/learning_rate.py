"""The learning rate is below what changes the weights."""

from rstar_lab.doctor.rule import Evidence, Log, rule


@rule(
    "learning rate too small",
    reads=("steps.lr",),
    cause=(
        "the learning rate is so small that the updates vanish in bf16 weights or take thousands of steps to matter"
    ),
    remedy=(
        "use about 1e-6 for models of 7B and more, more for smaller ones and for adapters (1e-5 to 1e-4); keep "
        "master weights in fp32"
    ),
    source="bf16 has 8 bits of mantissa: relative steps below 1/256 of a weight are lost",
)
def check(log: Log) -> Evidence | None:
    late = log.steps.lr.dropna().tail(max(1, len(log.steps) // 2))
    value = float(late.max())
    if not 0 <= value < 1e-8:
        return None
    text = f"learning rate {value:.2g} over the last {len(late)} steps"
    return Evidence(text, {"lr": value}, (), (), 0.8)
