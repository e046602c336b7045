"""Single updates change the policy too much."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, steps_where


def check(log: Log) -> Evidence | None:
    values = log.steps.kl_k3
    hit = steps_where(log, values > 0.3)
    if len(hit) < 2:
        return None
    text = f"the policy moves by more than 0.3 nats per token within one step at {len(hit)} steps (up to {values.max():.2g})"
    return Evidence(text, {"largest": float(values.max())}, hit, (), 0.8)


RULE = Rule(
    name="updates are too large",
    reads=("steps.kl_k3",),
    cause="single steps change the policy so much that its rollouts are no longer its own",
    remedy="lower the learning rate or the number of mini-batches",
    source="Schulman et al. 2017, arXiv 1707.06347",
    check=check,
)
