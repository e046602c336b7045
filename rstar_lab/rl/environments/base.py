"""The environment protocol: the task that a model acts in during one rollout."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rstar_lab.rl.problems import Problem
from rstar_lab.rl.trajectory import ToolCallRecord, Trajectory


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment returns after a turn of the model.

    text: shown to the model as a user message; if empty, there is no message. reward: reward of that turn, or None. done:
    whether the rollout ends here.
    """

    text: str = ""
    reward: float | None = None
    done: bool = False


NO_OBSERVATION = Observation()


@dataclass(frozen=True, slots=True)
class ModelMessage:
    """One turn of the model.

    text: the generated text, tool calls included. calls: the executed tool calls with their responses. turn: index of the
    turn, from 0.
    """

    text: str
    calls: tuple[ToolCallRecord, ...]
    turn: int


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One part of a reward. The reward is the sum of value * weight over all parts. A part with weight 0 is only a metric."""

    value: float
    weight: float = 1.0


Scores = Mapping[str, float | RewardPart]


class Environment(Protocol):
    """A task with state. Each rollout has its own instance, which is created without arguments.

    Inherit from this class and override what the task needs; `reset` is required. Methods may also be plain functions, which
    run in a thread. Each call has the time limit `rl.limits.tool_timeout_s`. If a method raises, exceeds the limit or returns another
    type, the rollout ends with the stop reason `environment_error`; such rollouts are stored but not trained on.
    """

    @property
    def tools(self) -> Sequence[Any]:
        """The tools of the model: methods, functions, classes with state, MCP servers (`mcp+stdio:COMMAND`), or objects with
        `schema` (see Tool).

        Functions need types and a docstring, from which their schema is made. The names and schemas must not depend on
        the problem, because they are part of the system prompt.
        """
        return ()

    async def reset(self, problem: Problem, seed: int) -> str | Observation:
        """Start the task and return the first user message. seed: seed of the rollout; derive all randomness from it."""
        ...

    async def step(self, message: ModelMessage) -> str | Observation | None:
        """Answer a turn of the model, after its tool calls were executed. Default: None.

        None or an empty text: the model gets no message. The rollout then continues after a turn with calls, and ends after
        a turn without calls.
        """
        return None

    async def score(self, trajectory: Trajectory) -> Scores:
        """Return the parts of the reward by name. They are stored as metrics. The rewards of the turns are added to the reward.

        Default: no parts.
        """
        return {}

    async def close(self) -> None:
        """Free resources. Called once at the end of the rollout, including after a failure."""


class EnvironmentFailure(Exception):
    """An environment failed. The message names environment, problem, method and cause."""


class MalformedResult(ValueError):
    """A method of an environment returned something that its protocol does not allow."""


def total_reward(scores: object) -> tuple[float, dict[str, float]]:
    """Return (reward, value of each part by name). Raises MalformedResult if a part has another type or is not finite."""
    if not isinstance(scores, Mapping):
        raise MalformedResult(f"returned {scores!r}; expected a dict of reward parts")
    reward, values = 0.0, dict[str, float]()
    for name, given in scores.items():
        part = given if isinstance(given, RewardPart) else RewardPart(given)
        try:
            value, weight = float(part.value), float(part.weight)
        except (TypeError, ValueError):
            raise MalformedResult(f"returned {part.value!r} for {name!r}; expected a number") from None
        if not (math.isfinite(value) and math.isfinite(weight)):
            raise MalformedResult(f"returned {value} with weight {weight} for {name!r}; expected finite numbers")
        reward += value * weight
        values[str(name)] = value
    return reward, values


def checked_observation(value: object) -> Observation:
    """Convert the return value of `reset` or `step` to an Observation. Raises MalformedResult for any other type."""
    if value is None:
        return NO_OBSERVATION
    if isinstance(value, str):
        return Observation(value)
    if not isinstance(value, Observation) or not isinstance(value.text, str):
        raise MalformedResult(f"returned {value!r:.200}; expected text, an Observation or None")
    if value.reward is not None and not (isinstance(value.reward, int | float) and math.isfinite(value.reward)):
        raise MalformedResult(f"returned the reward {value.reward!r}; expected a finite number")
    return value
