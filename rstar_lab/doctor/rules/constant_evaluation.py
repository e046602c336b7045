"""The held-out score is the same at every evaluation."""

from rstar_lab.doctor.rule import Evidence, Log, rule


@rule(
    "the held-out score never changes",
    reads=("steps.held_out",),
    cause="every evaluation reports exactly the same score: it evaluates old weights, or a cached result",
    remedy="check that the evaluator loads the weights of its step, and that it does not reuse results",
    source="verl #7495 (adapters that were never delivered)",
)
def check(log: Log) -> Evidence | None:
    values = log.steps.held_out.dropna()
    if len(values) < 4 or values.nunique() > 1 or values.iloc[0] in (0.0, 1.0):
        return None
    text = f"the held-out score is {values.iloc[0]:.4g} at all {len(values)} evaluations"
    return Evidence(text, {"score": float(values.iloc[0])}, log.steps.step[values.index].astype(int).tolist(), (), 0.4)
