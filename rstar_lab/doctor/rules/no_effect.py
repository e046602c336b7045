"""The updates do not change the policy."""

from rstar_lab.doctor.rule import Evidence, Log, rule


@rule(
    "updates change nothing",
    reads=("steps.grad_norm", "steps.kl_k3", "steps.ratio_max", "mini_batches"),
    cause=(
        "there is a gradient, but the weights do not move: the learning rate is too small, or the updates are below "
        "the resolution of bf16 weights"
    ),
    remedy=(
        "raise the learning rate; keep fp32 master weights; check that the optimizer holds the parameters that the "
        "loss uses"
    ),
    source="bf16 has 8 bits of mantissa: relative steps below 1/256 of a weight are lost",
)
def check(log: Log) -> Evidence | None:
    rows = log.steps.dropna(subset=["grad_norm", "kl_k3"])
    rows = rows[rows.grad_norm > 0]
    still = (rows.kl_k3.abs() < 1e-6) & (rows.ratio_max.sub(1).abs() < 1e-2)
    if len(rows) < 4 or still.sum() < max(4, 0.8 * len(rows)):  # the first update can round the weights once
        return None
    rows = rows[still]
    largest = float(rows.kl_k3.abs().max())
    text = (
        f"the policy moves by {largest:.1g} nats per token at most within an update, at {len(rows)} steps with a "
        f"gradient norm of {rows.grad_norm.median():.2g}"
    )
    return Evidence(text, {"kl": largest}, rows.step.astype(int).tolist(), (), 1.0)
