"""The training reward rises and the held-out score does not."""

from rstar_lab.doctor.rule import Evidence, Log, change, rule


@rule(
    "reward up, held-out flat",
    reads=("steps.reward", "steps.held_out"),
    cause="the policy improves on the training problems only: it learns the grader or memorises the problems",
    remedy=(
        "look for answers that the grader accepts wrongly, for copies of problems, and for a training set that is"
        " too small"
    ),
    source="Gao et al. 2023, arXiv 2210.10760 (reward over-optimisation)",
)
def check(log: Log) -> Evidence | None:
    held_out = log.steps.held_out.dropna()
    if len(held_out) < 9:  # three in each third
        return None
    train, evaluated = change(log.steps.reward, 0.99), change(held_out, 0.99)
    if not (train[1] > 0 and train[0] > 0.05 and evaluated[2] < 0.5 * train[0]):
        return None
    text = (
        f"training reward {train[0]:+.3f} [{train[1]:+.3f}, {train[2]:+.3f}], held-out {evaluated[0]:+.3f} "
        f"[{evaluated[1]:+.3f}, {evaluated[2]:+.3f}] (99%)"
    )
    return Evidence(text, {"train": train[0], "held_out": evaluated[0], "held_out_high": evaluated[2]}, (), (), 0.7)
