"""Single updates change the policy too much."""

from rstar_lab.doctor.rule import Evidence, Log, at_steps, rule


@rule(
    "updates are too large",
    reads=("steps.kl_k3",),
    cause="single steps change the policy so much that its rollouts are no longer its own",
    remedy="lower the learning rate or the number of mini-batches",
    source="Schulman et al. 2017, arXiv 1707.06347",
)
def check(log: Log) -> Evidence | None:
    values = log.steps.kl_k3
    return at_steps(
        log, values, values > 0.3, "the policy moves by {last:.2g} nats per token within one step", cost=0.8
    )
