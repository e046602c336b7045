"""The difference of engine and trainer grows step by step."""

from rstar_lab.doctor.rule import Evidence, Log, rule


@rule(
    "mismatch grows",
    reads=("steps.mismatch",),
    cause=(
        "the difference of engine and trainer grows from step to step: the engine keeps old weights, or an "
        "adapter is never delivered"
    ),
    remedy="check that every update reaches the engine: compare its log-probs with the checkpoint of the same step",
    source="verl #7495 (adapters that were never delivered)",
)
def check(log: Log) -> Evidence | None:
    values = log.steps.mismatch.dropna()
    if len(values) < 5:
        return None
    first, last = float(values.head(2).mean()), float(values.tail(2).mean())
    rising = float((values.diff().dropna() > 0).mean())
    if not (last > 1e-3 and last > 5 * first and rising >= 0.75):
        return None
    text = f"mismatch {first:.3g} at the start, {last:.3g} at the end, rising in {rising:.0%} of the steps"
    return Evidence(text, {"first": first, "last": last}, log.steps.step.tail(2).astype(int).tolist(), (), 0.9)
