"""The gradient is 0 although rollouts were generated."""

from rstar_lab.doctor.rule import Evidence, Log, at_steps, rule


@rule(
    "no gradient",
    reads=("steps.grad_norm",),
    cause=(
        "the gradient is 0: no rollout has an advantage, the loss mask is empty, or the optimizer holds no "
        "trained parameters"
    ),
    remedy=(
        "check the advantages and the loss mask of a batch, and with adapters that their parameters require gradients"
    ),
    source="arXiv 2503.14476",
)
def check(log: Log) -> Evidence | None:
    values = log.steps.grad_norm
    idle = log.steps.equal_share == 1 if log.has("steps.equal_share") else values.isna()
    zero = values == 0
    if (zero & ~idle).sum() < max(2, 0.2 * len(values)) and zero.sum() < max(4, 0.5 * len(values)):
        return None
    return at_steps(log, values, zero, "the gradient norm is 0", cost=float(zero.mean()))
