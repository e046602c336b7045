"""The reward rises through one of its parts only."""

import re

from rstar_lab.doctor.rule import Evidence, Log, change, rule


@rule(
    "only a side reward rises",
    reads=("steps.reward", "reward_parts"),
    cause="the reward rises through a part that is not correctness, such as format or length: the policy learns that part only",
    remedy="lower the weight of the part that rises, or pay it only to correct rollouts",
    source="Skalse et al. 2022, arXiv 2209.13085 (reward hacking)",
)
def check(log: Log) -> Evidence | None:
    parts = log.reward_parts().groupby("step").mean(numeric_only=True)
    total = change(log.steps.reward, 0.99)
    if len(parts) < 9 or parts.shape[1] < 2 or not total[1] > 0:
        return None
    moves = {str(name): change(parts[name], 0.99) for name in parts}
    right = [name for name in moves if CORRECTNESS.search(name)]
    # A part for correctness must not have risen by half of what the reward did, with confidence.
    if len(right) != 1 or not moves[right[0]][2] < 0.5 * total[0]:
        return None
    text = f"reward {total[0]:+.3f} [{total[1]:+.3f}, {total[2]:+.3f}]; its parts: " + ", ".join(
        f"{name} {value:+.3f} [{low:+.3f}, {high:+.3f}]" for name, (value, low, high) in moves.items()
    )
    return Evidence(text, {name: value for name, (value, _, _) in moves.items()}, (), (), 0.7)


CORRECTNESS = re.compile(r"(?i)acc|correct|verif|solv|pass|match")
