"""Load user functions that replace a part of the algorithm. A recipe names them as `module:function`.

Each process that calls a function loads it from the working directory. The returned functions check the results of the user's
function: an invalid result raises UserError whose message starts with the recipe key.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rstar_lab.common.errors import UserError
from rstar_lab.rl.algorithm.config import UserCorrection, UserLoss, UserPenalty
from rstar_lab.rl.algorithm.roc import UserRule
from rstar_lab.rl.plugins import finite_number, load_function
from rstar_lab.rl.trajectory import Trajectory


def user_rule(name: str) -> UserRule:
    """Return the resampling rule: (rewards, penalties, keep, rng) -> indices of the `keep` rollouts to train on."""
    rule = load_function(name, "rl.method.roc.rule", ("rewards", "penalties", "keep", "rng"))

    def checked(rewards: np.ndarray, penalties: np.ndarray, keep: int, rng: np.random.Generator) -> list[int]:
        result = rule(rewards, penalties, keep, rng)
        indices = np.asarray(result)
        if (
            indices.shape != (keep,)
            or indices.dtype.kind not in "iu"
            or len(set(indices.tolist())) != keep
            or not ((indices >= 0) & (indices < len(rewards))).all()
        ):
            raise UserError(
                f"rl.method.roc.rule: {name} returned {result!r}; expected {keep} different indices below {len(rewards)}"
            )
        return indices.tolist()

    return checked


def user_penalty(name: str) -> UserPenalty:
    """Return the penalty of a rollout: (trajectory) -> number >= 0."""
    penalty = load_function(name, "rl.method.roc.penalties", ("trajectory",))

    def checked(trajectory: Trajectory) -> float:
        value = finite_number(penalty(trajectory), f"rl.method.roc.penalties: {name}")
        if value < 0:
            raise UserError(f"rl.method.roc.penalties: {name} returned {value}; expected a number of at least 0")
        return value

    return checked


def user_loss(name: str) -> UserLoss:
    """Return the loss: (log_probs, old_log_probs, advantages, mask) -> loss of each token; all are (batch, tokens)."""
    loss = load_function(name, "rl.method.loss", ("log_probs", "old_log_probs", "advantages", "mask"))
    return lambda *tensors: _same_shape(loss(*tensors), tensors[-1], f"rl.method.loss: {name}")


def user_correction(name: str) -> UserCorrection:
    """Return the correction: (trainer_log_probs, engine_log_probs, mask) -> weight of each token; all are (batch, tokens)."""
    correction = load_function(name, "rl.correction.type", ("trainer_log_probs", "engine_log_probs", "mask"))
    return lambda *tensors: _same_shape(correction(*tensors), tensors[-1], f"rl.correction.type: {name}")


def user_chat_template(name: str) -> Callable[[list[dict[str, Any]], Sequence[dict[str, Any]], bool], str]:
    """Return the chat template: (messages, tools, add_generation_prompt) -> text of the whole conversation."""
    template = load_function(name, "rl.prompt.chat_template", ("messages", "tools", "add_generation_prompt"))

    def checked(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        text = template(messages, tools, add_generation_prompt)
        if not isinstance(text, str):
            raise UserError(f"rl.prompt.chat_template: {name} returned {type(text).__name__}; expected a string")
        return text

    checked.__name__ = f"rl.prompt.chat_template: {name}"  # for the errors of ModelRenderer
    return checked


def user_metric(name: str) -> Callable[[Sequence[Trajectory]], float | None]:
    """Return the metric: (trajectories of all rollouts of a step) -> number, or None if it is not defined for the step."""
    metric = load_function(name, "rl.metrics", ("trajectories",))

    def checked(trajectories: Sequence[Trajectory]) -> float | None:
        value = metric(trajectories)
        return None if value is None else finite_number(value, f"rl.metrics: {name}")

    return checked


def _same_shape(value: Any, mask: Any, where: str) -> Any:
    if getattr(value, "shape", None) != mask.shape:
        found = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
        raise UserError(
            f"{where} returned {found}; expected a tensor of shape {tuple(mask.shape)}, one value per token"
        )
    return value
