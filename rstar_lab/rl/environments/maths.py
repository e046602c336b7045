"""The task of the paper as an environment: ask a question, execute tool calls, score the final answer."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rstar_lab.rl.environments.base import Environment, Scores
from rstar_lab.rl.environments.episode import Episode
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.reward import RolloutReward
from rstar_lab.rl.tools.base import Tool
from rstar_lab.rl.tools.user import UserTool
from rstar_lab.rl.trajectory import Trajectory


class MathsEnvironment(Environment):
    """The task of the recipe keys `rl.tools` and `rl.reward`. Source: rStar2-Agent, section 2."""

    def __init__(
        self, shared_tools: Mapping[str, Tool], reward: Callable[[str, str], float], problem: Problem, traj_id: str
    ):
        """shared_tools: tools that all rollouts use. They store the state of each rollout under its traj_id."""
        self.shared_tools, self.reward, self.problem, self.traj_id = shared_tools, reward, problem, traj_id

    @property
    def tools(self) -> Sequence[Any]:
        return list(self.shared_tools.values())

    async def reset(self, problem: Problem, seed: int) -> str:
        return problem.question

    async def score(self, trajectory: Trajectory) -> Scores:
        """Return the reward and metrics of the reward function."""
        reward, metrics = await self.compute_reward(trajectory)
        return {"reward": reward} | metrics

    async def compute_reward(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """Return (reward, metrics) of a rollout. An error of a user's reward function raises UserError, which stops the run."""
        if not isinstance(self.reward, RolloutReward):
            return float(await asyncio.to_thread(self.reward, trajectory.text, self.problem.answer)), {}
        tools = {name: getattr(tool, "tool", tool) for name, tool in self.shared_tools.items()}  # verl wraps tools
        states = {name: tool.state(self.traj_id) for name, tool in tools.items() if isinstance(tool, UserTool)}
        return await self.reward.score_rollout(trajectory.text, self.problem, calls=trajectory.calls, tools=states)

    async def close(self) -> None:
        for tool in self.shared_tools.values():
            await tool.close(self.traj_id)


class MathsEpisode(Episode):
    """Runs a MathsEnvironment for one rollout, without checks and time limits: its methods are not user code."""

    environment: MathsEnvironment
    has_step = False

    async def reset(self, seed: int) -> str:
        return self.problem.question

    async def score(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        return await self.environment.compute_reward(trajectory)
