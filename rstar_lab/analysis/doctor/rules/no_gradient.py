"""The gradient is 0 although rollouts were generated."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, steps_where


def check(log: Log) -> Evidence | None:
    hit = steps_where(log, log.steps.grad_norm == 0)
    if len(hit) < max(2, 0.3 * log.steps.grad_norm.notna().sum()):
        return None
    text = f"the gradient norm is 0 at {len(hit)} of {int(log.steps.grad_norm.notna().sum())} steps"
    return Evidence(text, {"steps": len(hit)}, hit, (), len(hit) / len(log.steps))


RULE = Rule(
    name="no gradient",
    reads=("steps.grad_norm",),
    cause=(
        "the gradient is 0: no rollout has an advantage, the loss mask is empty, or the optimizer holds no "
        "trained parameters"
    ),
    remedy=(
        "check the advantages and the loss mask of a batch, and with adapters that their parameters require gradients"
    ),
    source="arXiv 2503.14476",
    check=check,
)
