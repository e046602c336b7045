"""Rules over token ids, loss masks and log-probs."""

import numpy as np
import pandas as pd

from rstar_lab.doctor.rule import Evidence, Log, among

SPAN = 8  # consecutive tokens without a sampled log-prob that are no chance


def loss_mask(log: Log) -> Evidence | None:
    """Every token in the loss mask has the log-prob with which the engine sampled it, and no other token has one."""
    rows = log.tokens()
    arrays = rows[["loss_mask", "engine_log_probs"]].to_numpy()
    pairs = [(np.asarray(mask, bool), np.asarray(own, float)) for mask, own in arrays]
    outside = [bool((~mask & (np.nan_to_num(own) != 0)).any()) for mask, own in pairs]
    inside = [_without_log_prob(mask, own) for mask, own in pairs]
    for found, above, what in (
        (outside, 0.01, "rollouts have sampled tokens outside of the loss mask"),
        (
            inside,
            0.02,
            "rollouts have tokens in the loss mask that the engine did not sample, such as outputs of tools",
        ),
    ):
        hit = pd.Series(found, index=rows.index, dtype=bool)
        if evidence := among(rows, hit, what, above=above, least=10, cost=0.9):
            return evidence
    return None


def _without_log_prob(mask: np.ndarray, log_probs: np.ndarray) -> bool:
    """Return whether tokens in the mask have no log-prob: NaN, or exactly 0 over a span between sampled tokens."""
    if np.isnan(log_probs[mask]).any():
        return True
    unsampled = mask & (log_probs == 0)
    if unsampled[mask].mean() > 0.9 if mask.any() else True:  # the engine returns no log-probs at all
        return False
    edges = np.flatnonzero(np.diff(np.concatenate([[0], unsampled.astype(int), [0]])))
    return bool(len(edges)) and int((edges[1::2] - edges[::2]).max()) >= SPAN


def no_log_probs(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rollouts.engine_log_prob.notna() & (log.rollouts.model_tokens.fillna(0) > 0)]
    return among(rows, rows.engine_log_prob == 0, "rollouts have log-probs of 0", above=0.5, cost=1.0)


def impossible_log_probs(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rollouts.engine_log_prob.notna()]
    positive = rows.engine_log_prob > 1e-6
    if positive.any():
        what = "rollouts have a mean log-prob above 0, which no probability has"
        return among(rows, positive, what, above=0.0, cost=0.9)
    what = "rollouts have sampled tokens with a mean log-prob below -8, far below that of any text of a policy"
    return among(rows, rows.engine_log_prob < -8, what, above=0.2, cost=0.9)
