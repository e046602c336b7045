"""Load the environments that a recipe names as `module:Class`."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.rl.environments.base import Environment, EnvironmentFailure, MalformedResult, total_reward
from rstar_lab.rl.environments.episode import Episode
from rstar_lab.rl.plugins import load_named
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.reward.foreign import is_scorer, parameters_of, required_of
from rstar_lab.rl.tools.base import Tool, ToolResult, tool_name
from rstar_lab.rl.tools.registry import by_name, load_tools
from rstar_lab.rl.tools.user import UserTool
from rstar_lab.rl.trajectory import Trajectory


class MethodTool(UserTool):
    """A tool that is a method of the environment. Calls of one rollout run one after the other."""

    def __init__(self, environment: str, method: Any, time_limit_s: float, episodes: Mapping[str, Episode]):
        super().__init__(f"{environment}:{method.__name__}", method, time_limit_s)
        self.method, self.episodes, self.stateful = method.__name__, episodes, True

    def _instance(self, traj_id: str) -> Any:
        return getattr(self.episodes[traj_id].environment, self.method)

    def _lock(self, traj_id: str) -> asyncio.Lock:
        return self.episodes[traj_id].lock

    async def close(self, traj_id: str) -> None: ...


class ObjectTool:
    """A tool that is an object of the environment and follows the Tool protocol."""

    def __init__(self, tool: Tool, episodes: Mapping[str, Episode]):
        self.schema, self.name, self.episodes = tool.schema, tool_name(tool.schema), episodes

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult:
        return await self._find(traj_id)(arguments, seed=seed, traj_id=traj_id)

    async def close(self, traj_id: str) -> None:
        if traj_id in self.episodes:
            await self._find(traj_id).close(traj_id)

    def _find(self, traj_id: str) -> Tool:
        tools = self.episodes[traj_id].environment.tools
        return next(tool for tool in tools if hasattr(tool, "schema") and tool_name(tool.schema) == self.name)


def describe_tools(
    name: str, offered: Sequence[Any], time_limit_s: float, episodes: Mapping[str, Episode]
) -> dict[str, Tool]:
    """Return the tools that an environment offers, by the name that the model uses.

    name: name of the environment. offered: `Environment.tools` of an instance that is not reset. episodes: episodes of
    the rollouts in progress, by traj_id. Raises UserError for an object that is not a tool, and for two tools with the
    same name.
    """
    tools: list[Tool] = []
    for given in offered:
        if isinstance(given, str):
            tools += load_tools(given, time_limit_s)
        elif inspect.ismethod(given):
            tools.append(MethodTool(name, given, time_limit_s, episodes))
        elif hasattr(given, "schema"):
            tools.append(ObjectTool(given, episodes))
        elif callable(given) and hasattr(given, "__name__"):
            tools.append(UserTool(f"{name}:{given.__name__}", given, time_limit_s))
        else:
            raise UserError(
                f"rl.environments: {name}: {given!r} is not a tool: expected a function, class, MCP server or object"
            )
    return by_name(tools, f"rl.environments: {name}")


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
        """Return a new environment for a rollout. Raises EnvironmentFailure."""
        episode = self.episodes[traj_id] = self._episode(problem)
        return episode

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


def is_environment(loaded: Any) -> bool:
    """Return whether an object is a class, or a function without arguments, that creates environments, and not a reward."""
    if not callable(loaded) or is_scorer(loaded):
        return False
    accepts_any = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters_of(loaded))
    return isinstance(loaded, type) or not (accepts_any or required_of(parameters_of(loaded)))


def load_environment(name: str, target: str, time_limit_s: float) -> EnvironmentClass:
    """Load the environment that `target` names as `module:name`. Raises UserError.

    `name` is a class, or a function that returns an instance.
    """
    loaded = load_named(target, f"rl.environments.{name}.environment")
    if not callable(loaded):
        raise UserError(f"rl.environments.{name}.environment: {target} is a {type(loaded).__name__}; expected a class")
    if required := required_of(parameters_of(loaded)):
        raise UserError(f"rl.environments.{name}.environment: {target} must not require arguments ({required[0]})")
    return EnvironmentClass(name, loaded, time_limit_s)
