"""Load the environments that a recipe names as `module:Class`."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.rl.environments.base import Environment, EnvironmentFailure, MalformedResult, total_reward
from rstar_lab.rl.environments.episode import Episode
from rstar_lab.rl.environments.inspect_task import InspectTask, is_task
from rstar_lab.rl.environments.tools import describe_tools
from rstar_lab.rl.plugins import load_named
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.tools.base import Tool
from rstar_lab.rl.trajectory import Trajectory


@dataclass
class EnvironmentClass:
    """An environment of a run. Creates an instance for every rollout and keeps those of the rollouts in progress.

    make: returns a new instance. tools: tools of the environment, by the name that the model uses. time_limit_s: time limit
    of each call of the environment and of its tools. scores_groups: whether it has the method `score_group`.
    """

    name: str
    make: Callable[[], Environment]
    time_limit_s: float
    episodes: dict[str, Episode] = field(default_factory=dict)
    tools: dict[str, Tool] = field(init=False)
    scores_groups: bool = field(init=False)

    def __post_init__(self) -> None:
        """Raises UserError if no instance can be created or a method is missing."""
        try:
            template = self.make()
            offered = template.tools
        except Exception as error:
            raise UserError(f"rl.environments: {self.name}: {type(error).__name__}: {error}") from error
        for method in ("reset", "step", "score", "close"):
            if not callable(getattr(template, method, None)):
                raise UserError(
                    f"rl.environments: {self.name}: {type(template).__name__} has no method {method}; inherit from "
                    "rstar_lab.rl.environments.base.Environment"
                )
        self.scores_groups = callable(getattr(template, "score_group", None))
        self.tools = describe_tools(self.name, offered, self.time_limit_s, self.episodes)

    def open(self, problem: Problem, traj_id: str) -> Episode:
        """Return the environment of a rollout; create it unless the rollout continues an earlier one. Raises EnvironmentFailure."""
        if traj_id not in self.episodes:
            self.episodes[traj_id] = self._episode(problem)
        return self.episodes[traj_id]

    def _episode(self, problem: Problem) -> Episode:
        try:
            environment = self.make()
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise EnvironmentFailure(
                f"environment {self.name}, problem {problem.problem_id}: the constructor raised {cause}"
            ) from error
        return Episode(environment, self.name, problem, self.time_limit_s)

    async def close(self, traj_id: str) -> None:
        """Close the environment and the tools of a rollout that has ended or will not be continued."""
        for tool in self.tools.values():
            await tool.close(traj_id)
        episode = self.episodes.pop(traj_id, None)
        if episode is not None:
            await episode.close()

    async def score_group(self, problem: Problem, group: Sequence[Trajectory]) -> list[tuple[float, dict[str, float]]]:
        """Return the (reward, metrics) that `score_group` adds for each rollout. Raises EnvironmentFailure."""

        def check(scores: Any) -> list[tuple[float, dict[str, float]]]:
            results = [total_reward(parts) for parts in scores]
            if len(results) != len(group):
                raise MalformedResult(f"returned {len(results)} scores for {len(group)} rollouts")
            return results

        return await self._episode(problem).call("score_group", check, group)


def load_environment(name: str, target: str, time_limit_s: float) -> EnvironmentClass:
    """Load the environment that `target` names as `module:name`. Raises UserError.

    `name` is a class, a function that returns an instance, or an Inspect task.
    """
    loaded = load_named(target, f"rl.environments.{name}.environment")
    if is_task(loaded):
        return EnvironmentClass(name, InspectTask(target, loaded), time_limit_s)
    if not callable(loaded):
        raise UserError(f"rl.environments.{name}.environment: {target} is a {type(loaded).__name__}; expected a class")
    required = [
        p.name for p in inspect.signature(loaded).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]  # fmt: skip
    if required:
        raise UserError(f"rl.environments.{name}.environment: {target} must not require arguments ({required[0]})")
    return EnvironmentClass(name, loaded, time_limit_s)
