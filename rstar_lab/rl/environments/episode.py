"""Run the environment of one rollout, with a time limit for every call and checks of every return value."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from rstar_lab.rl.environments.base import (
    Environment,
    EnvironmentFailure,
    MalformedResult,
    ModelMessage,
    Observation,
    checked_observation,
    total_reward,
)
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.reward import RolloutReward
from rstar_lab.rl.tools.base import Tool
from rstar_lab.rl.tools.user import UserTool, run_in_daemon_thread
from rstar_lab.rl.trajectory import Trajectory

log = logging.getLogger(__name__)


class Episode:
    """Runs one environment for one rollout. Failures of the environment raise EnvironmentFailure.

    has_step: whether to call `step` after each turn.
    """

    has_step = True

    def __init__(self, environment: Environment, name: str, problem: Problem, time_limit_s: float | None):
        """name: name of the environment, used in errors. time_limit_s: time limit of each call; None: no limit."""
        self.environment, self.name, self.problem, self.time_limit_s = environment, name, problem, time_limit_s
        self.lock = asyncio.Lock()  # tool calls of one rollout run one after the other

    async def reset(self, seed: int) -> str:
        """Start the task and return the first user message. seed: seed of the rollout."""
        observation = await self.call("reset", checked_observation, self.problem, seed)
        if not observation.text:
            raise self._failure("reset", "returned no text")
        return observation.text

    async def step(self, message: ModelMessage) -> Observation:
        """Return the observation of the environment after a turn."""
        return await self.call("step", checked_observation, message)

    async def score(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """Return (reward, metrics) of the rollout. The reward includes the rewards of its turns."""
        reward, values = await self.call("score", total_reward, trajectory)
        turn_rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
        if turn_rewards:
            values["turns"] = sum(turn_rewards)
        return reward + sum(turn_rewards), values

    async def close(self) -> None:
        """Close the environment. A failure is only logged, because the rollout has already ended."""
        try:
            await self.call("close", lambda value: value)
        except EnvironmentFailure as failure:
            log.warning("%s", failure)

    async def call(self, method: str, check: Callable[[Any], Any], *values: Any) -> Any:
        """Call a method of the environment and check what it returns. Raises EnvironmentFailure."""
        function = getattr(self.environment, method)
        limit = asyncio.timeout(self.time_limit_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(function):
                    result = await function(*values)
                else:
                    result = await run_in_daemon_thread(lambda: function(*values))
            return check(result)
        except MalformedResult as error:
            raise self._failure(method, str(error)) from error
        except Exception as error:
            if limit.expired():
                raise self._failure(method, f"did not return within {self.time_limit_s:g} s") from None
            raise self._failure(method, f"raised {type(error).__name__}: {error}") from error

    def _failure(self, method: str, cause: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"environment {self.name}, problem {self.problem.problem_id}: {method} {cause}")


class MathsEpisode(Episode):
    """The task of the recipe keys `rl.tools` and `rl.reward` for one rollout (rStar2-Agent, section 2): ask the question, score the
    final answer. Without checks and time limits."""

    has_step = False

    def __init__(self, tools: Mapping[str, Tool], reward: Callable[[str, str], float], problem: Problem, traj_id: str):
        """tools: tools that all rollouts use. They store the state of each rollout under its traj_id."""
        self.tools, self.reward, self.problem, self.traj_id = tools, reward, problem, traj_id

    async def reset(self, seed: int) -> str:
        return self.problem.question

    async def score(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """Return (reward, metrics) of the reward function. An error of a user's function raises UserError, which stops the run."""
        if not isinstance(self.reward, RolloutReward):
            return float(await asyncio.to_thread(self.reward, trajectory.text, self.problem.answer)), {}
        states = {name: tool.state(self.traj_id) for name, tool in self.tools.items() if isinstance(tool, UserTool)}
        return await self.reward.score_rollout(trajectory.text, self.problem, calls=trajectory.calls, tools=states)
