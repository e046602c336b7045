"""The loss mask covers tokens that the model did not write."""

import numpy as np
import pandas as pd

from rstar_lab.doctor.rule import Evidence, Log, among, rule


@rule(
    "the loss mask is wrong",
    reads=("tokens",),
    cause=(
        "the loss mask does not cover the tokens that the engine sampled: it is shifted, so tool responses are "
        "trained on"
    ),
    remedy="compare the mask of the named rollouts with their turns; build it from token ids, never from text",
    source="trl #4976",
)
def check(log: Log) -> Evidence | None:
    rows = log.tokens()
    outside = [
        bool((~mask.astype(bool) & (np.nan_to_num(np.asarray(own, dtype=float)) != 0)).any())
        for mask, own in zip(rows.loss_mask, rows.engine_log_probs, strict=True)
    ]
    what = "rollouts have sampled tokens outside of the loss mask"
    return among(rows, pd.Series(outside, index=rows.index), what, above=0.01, least=10, cost=0.9)
