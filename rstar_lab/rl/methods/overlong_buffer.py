"""Soft overlong penalty of DAPO (arXiv 2503.14476, equation 13).

The reward falls linearly by 1 over the last `tokens` tokens before `limits.max_response_tokens`:
min(0, (max_response_tokens - tokens - length) / tokens), at least -1. Only the advantages use the shaped reward.
"""

from dataclasses import dataclass
from typing import Literal

from rstar_lab.rl.algorithm.hooks import MethodHooks
from rstar_lab.rl.algorithm.shaping import overlong_penalty
from rstar_lab.rl.section import Positive, Section
from rstar_lab.rl.trajectory import Trajectory


class OverlongBuffer(Section):
    """Soft overlong penalty (DAPO, arXiv 2503.14476, equation 13): the reward falls linearly by 1 over `tokens` tokens before the
    limit. Used for advantages only."""

    type: Literal["overlong_buffer"] = "overlong_buffer"
    """Name of the method."""
    tokens: Positive
    """Tokens before `limits.max_response_tokens` over which the reward falls."""


@dataclass(frozen=True)
class OverlongBufferHooks(MethodHooks):
    """Adds `overlong_penalty` to the reward."""

    tokens: int
    max_response_tokens: int

    def shape_reward(self, rollout: Trajectory) -> float:
        return overlong_penalty(len(rollout.response_ids), self.max_response_tokens, self.tokens)
