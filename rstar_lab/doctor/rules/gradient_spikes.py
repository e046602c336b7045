"""Single steps have a gradient norm far above the usual one."""

import numpy as np

from rstar_lab.doctor.rule import Evidence, Log, at_steps, rule


@rule(
    "gradient spikes",
    reads=("steps.grad_norm",),
    cause="single steps have a gradient far above the usual one, or one that is not finite",
    remedy="lower the learning rate and `max_grad_norm`; look at the rollouts of these steps",
    source="arXiv 2606.26027",
)
def check(log: Log) -> Evidence | None:
    values = log.steps.grad_norm
    logs = np.log(values.where(values > 0))
    spread = 1.4826 * float((logs - logs.median()).abs().median())  # standard deviation of normal data
    spike = logs - logs.median() > max(np.log(10), 6 * spread)
    return at_steps(
        log, values, spike | np.isinf(values), "gradient norm {last:.3g}, {median:.3g} usually", least=1, cost=0.4
    )
