"""The reward: 1 exactly when the final answer is right (rStar2-Agent, section 2: nothing for format or tool use), or the user's own.

`verify` runs anywhere; the rest of this module only gives it its name in the language of RL.
"""

import math
from collections.abc import Callable
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.rl.plugins import load_named
from rstar_lab.verify import extract_answer, verify, verify_many, warm_up

__all__ = ["extract_answer", "make_reward", "reward", "verify", "verify_many", "warm_up"]


def reward(response_text: str, answer: str) -> float:
    """1.0 or 0.0. Hand in the model's own text only, never what tools printed."""
    return float(verify(response_text, answer))


def make_reward(name: str) -> Callable[[str, str], float]:
    """The reward that a recipe names: `verify`, or `module:function` of (the model's own text, the true answer).

    An own one gives a finite number and is called in threads, several at once; RoC takes a rollout for right where it is above 0.
    Raises UserError where there is none, and where it fails: to train on what a broken reward says is worse than to stop.
    """
    if name == "verify":
        return reward
    own = load_named(name, "rl.reward")
    if not callable(own):
        raise UserError(f"rl.reward: {name}: a {type(own).__name__}; a function is wanted")

    def checked(response_text: str, answer: str) -> float:
        try:
            given: Any = own(response_text, answer)
            value = float(given)
        except Exception as error:
            raise UserError(f"rl.reward: {name}: {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise UserError(f"rl.reward: {name}: it gave {given!r}; a finite number is wanted")
        return value

    return checked
