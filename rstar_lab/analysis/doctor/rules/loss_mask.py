"""The loss mask covers tokens that the model did not write."""

import numpy as np

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule


def check(log: Log) -> Evidence | None:
    rows = log.tokens()
    if len(rows) < 10:
        return None
    outside = [
        int((~mask.astype(bool) & (np.nan_to_num(np.asarray(own, dtype=float)) != 0)).sum())
        for mask, own in zip(rows.loss_mask, rows.engine_log_probs, strict=True)
    ]
    wrong = np.asarray(outside) > 0
    if wrong.mean() < 0.02:
        return None
    text = f"in {wrong.mean():.0%} of {len(rows)} rollouts that were read, sampled tokens lie outside of the loss mask"
    return Evidence(text, {"share": float(wrong.mean())}, (), rows.traj_id[wrong].head(20).tolist(), 0.9)


RULE = Rule(
    name="the loss mask is wrong",
    reads=("tokens",),
    cause=(
        "the loss mask does not cover the tokens that the engine sampled: it is shifted, so tool responses are "
        "trained on"
    ),
    remedy="compare the mask of the named rollouts with their turns; build it from token ids, never from text",
    source="trl #4976",
    check=check,
)
