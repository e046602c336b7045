"""The tokens of one response as a data frame."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

_VALUES = {"engine_log_prob": "engine_log_probs", "trainer_log_prob": "trainer_log_probs", "entropy": "entropy"}


def token_frame(row: Mapping[str, Any], texts: Sequence[Any] | None, calls: Iterable[tuple[int, str]]) -> pd.DataFrame:
    """Return one row per response token, with the columns of `Runs.tokens`.

    Args:
        row: traj_id, advantage and the token arrays of a transcript.
        texts: Text of each token; None without a vocabulary.
        calls: Position and outcome of the tool calls, in the order of the positions.
    """
    ids = np.asarray(row["response_ids"])
    mask = np.ones(len(ids), bool) if row["loss_mask"] is None else np.asarray(row["loss_mask"], bool)
    frame = pd.DataFrame({"traj_id": row["traj_id"], "position": np.arange(len(ids)), "token_id": ids})
    frame["text"] = pd.Series(texts or [None] * len(ids), dtype=object)
    frame["model"] = mask
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    frame["turn"] = np.maximum(np.cumsum(starts) - 1, 0)
    for name, key in _VALUES.items():
        frame[name] = np.where(mask, np.nan if row[key] is None else np.asarray(row[key], np.float32), np.nan)
    frame["mismatch"] = frame.engine_log_prob - frame.trainer_log_prob
    frame["advantage"] = np.where(mask, row["advantage"], np.nan)
    after = np.full(len(ids), None, object)
    for position, outcome in calls:
        after[int(position) :] = "ok" if outcome == "ok" else "error"
    frame["after"] = after
    return frame
