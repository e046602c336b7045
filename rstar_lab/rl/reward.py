"""The reward of a rollout: 1 if the final answer is correct, else 0, or a function of the user.

Source: rStar2-Agent, section 2: no reward for format or tool use.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.rl.plugins import load_named
from rstar_lab.verify import AnswerFormat, extract_answer, verify, verify_many, warm_up

__all__ = ["extract_answer", "make_reward", "reward", "verify", "verify_many", "warm_up"]


def reward(response_text: str, answer: str, *, answer_format: AnswerFormat = "tagged") -> float:
    """Return 1.0 if the response's final answer equals `answer`, else 0.0.

    response_text: the model's own text only, never tool output. answer_format: see `rstar_lab.verify.extract_answer`.
    """
    return float(verify(response_text, answer, answer_format=answer_format))


def make_reward(name: str, answer: AnswerFormat = "tagged") -> Callable[[str, str], float]:
    """Return the reward function that a recipe names: a function of (the model's own text, the true answer).

    name: recipe key `rl.reward`: `verify`, or `module:function`. A user function returns a finite number and is called
    from several threads. RoC treats a rollout as correct if its reward is above 0.
    answer: recipe key `rl.answer`: where `verify` reads the answer. A user function ignores it.
    Raises UserError if the function does not exist, and if a call of it fails or returns no finite number.
    """
    if name == "verify":
        return reward if answer == "tagged" else partial(reward, answer_format=answer)
    function = load_named(name, "rl.reward")
    if not callable(function):
        raise UserError(f"rl.reward: {name} is a {type(function).__name__}; expected a function")

    def checked(response_text: str, answer: str) -> float:
        try:
            result: Any = function(response_text, answer)
            value = float(result)
        except Exception as error:
            raise UserError(f"rl.reward: {name} failed: {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise UserError(f"rl.reward: {name} returned {result!r}; expected a finite number")
        return value

    return checked
