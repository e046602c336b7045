"""Single steps have a gradient norm far above the usual one."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, steps_where


def check(log: Log) -> Evidence | None:
    values = log.steps.grad_norm
    first = float(values.dropna().head(3).median())
    hit = steps_where(log, (values > 10 * values.median()) | ~(values.fillna(0).abs() < 1e30))
    if len(hit) < 1:
        return None
    value = float(values[log.steps.step.isin(hit)].iloc[-1])
    text = f"gradient norm {value:.3g} against a median of {values.median():.3g}, at {len(hit)} steps"
    return Evidence(text, {"value": value, "first": first}, hit, (), 0.4)


RULE = Rule(
    name="gradient spikes",
    reads=("steps.grad_norm",),
    cause="single steps have a gradient far above the usual one, or one that is not finite",
    remedy="lower the learning rate and `max_grad_norm`; look at the rollouts of these steps",
    source="arXiv 2606.26027",
    check=check,
)
