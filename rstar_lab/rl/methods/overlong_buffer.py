"""Soft overlong penalty of DAPO (arXiv 2503.14476, equation 13).

The reward falls linearly by 1 over the last `tokens` tokens before `limits.max_response_tokens`:
min(0, (max_response_tokens - tokens - length) / tokens), at least -1. Only the advantages use the shaped reward.
"""

from typing import Any, Literal

from rstar_lab.rl.methods.base import MethodSection
from rstar_lab.rl.section import Positive
from rstar_lab.rl.trajectory import Trajectory


def overlong_penalty(response_tokens: int, max_response_tokens: int, buffer_tokens: int) -> float:
    """Return the value to add to a reward: 0 up to `buffer_tokens` before the limit, then falling linearly to -1 at the
    limit.

    Source: DAPO (arXiv 2503.14476), equation 13, soft overlong punishment. Raises ValueError if buffer_tokens is not in
    1..max_response_tokens.
    """
    if not 0 < buffer_tokens <= max_response_tokens:
        raise ValueError(
            f"buffer_tokens must lie in 1..{max_response_tokens} (max_response_tokens), got {buffer_tokens}"
        )
    past = response_tokens - (max_response_tokens - buffer_tokens)
    return -min(max(past / buffer_tokens, 0.0), 1.0)


class OverlongBuffer(MethodSection):
    """Soft overlong penalty (DAPO, arXiv 2503.14476, equation 13): the reward falls linearly by 1 over `tokens` tokens before the
    limit. Used for advantages only."""

    type: Literal["overlong_buffer"] = "overlong_buffer"
    """Name of the method."""
    tokens: Positive
    """Tokens over which the reward falls."""

    def check(self, rl: Any) -> None:
        if self.tokens > (longest := rl.limits.max_response_tokens):
            raise ValueError(
                f"method.add: tokens of overlong_buffer must be at most limits.max_response_tokens, {longest}"
            )

    def shape_reward(self, rollout: Trajectory) -> float:
        return overlong_penalty(len(rollout.response_ids), self._rl.limits.max_response_tokens, self.tokens)
