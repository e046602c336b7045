"""Rollouts of a group have the same text."""

import numpy as np

from rstar_lab.doctor.rule import Evidence, Log, among, rule


@rule(
    "copies of rollouts",
    reads=("texts", "rollouts.group_id"),
    cause=(
        "rollouts of a group are copies of each other: the sampler uses one seed or temperature 0, or the policy "
        "is deterministic"
    ),
    remedy="check temperature and seeds of the sampler; look at the entropy",
    source="NeMo-RL #2207",
)
def check(log: Log) -> Evidence | None:
    texts = log.texts()
    texts = texts[texts.own.str.strip().str.len() > 40]
    size = texts.groupby("group_id").own.transform("size")
    texts = texts[size >= 4]
    copies = texts.duplicated(["group_id", "own"], keep=False)
    # A policy with little entropy repeats itself. Its log-probs say how often: compare with rollouts that are drawn independently.
    same = (texts.engine_log_prob * texts.model_tokens).astype(float).map(np.exp)
    expected = float((1 - (1 - same) ** (size[texts.index] - 1)).mean()) if same.notna().all() else 0.0
    what = (
        f"rollouts have the same text as another one of their group; {expected:.0%} are expected from their log-probs"
    )
    above = max(0.3, 2 * expected) if same.notna().all() else 0.6
    return among(texts, copies, what, above=above, least=40)
