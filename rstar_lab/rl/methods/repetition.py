"""Penalty on repeated n-grams (arXiv 2502.03373).

weight * (1 - different n-grams / n-grams) is subtracted from the reward. N-grams are those of the tokens that the model
generated, within each turn. rStar2-Agent tried to weight rollouts down by such repetition without success ("unsuccessful attempts").
"""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rstar_lab.rl.methods.base import MethodSection
from rstar_lab.rl.section import Positive
from rstar_lab.rl.trajectory import Trajectory


class Repetition(MethodSection):
    """Subtracts `weight` times the share of repeated n-grams from the reward (after arXiv 2502.03373). Used for advantages only.
    The paper tried a similar penalty without success."""

    type: Literal["repetition"] = "repetition"
    """Name of the method."""
    weight: float = Field(gt=0)
    """Weight of the penalty."""
    ngram: Positive = 20
    """Tokens of an n-gram."""

    reads_texts: ClassVar[bool] = True

    def shape_reward(self, rollout: Trajectory) -> float:
        return -self.weight * repeated_share(rollout, self.ngram)


def repeated_share(rollout: Trajectory, ngram: int) -> float:
    """Return the share of the rollout's n-grams that occurred before; 0 without an n-gram."""
    ids, windows = np.asarray(rollout.response_ids), []
    for turn in rollout.turns:
        if turn.end - turn.start >= ngram:
            windows.append(np.lib.stride_tricks.sliding_window_view(ids[turn.start : turn.end], ngram))
    if not windows:
        return 0.0
    found = np.concatenate(windows)
    return 1.0 - len(np.unique(found, axis=0)) / len(found)
