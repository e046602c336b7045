"""The tools of an environment. Each call is executed by the environment of its rollout."""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.rl.environments.episode import Episode
from rstar_lab.rl.tools.base import Tool, ToolResult, tool_name
from rstar_lab.rl.tools.mcp import PREFIXES, load_mcp_tools
from rstar_lab.rl.tools.user import UserTool, load_user_tool


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
    tools: dict[str, Tool] = {}
    for given in offered:
        created: list[Tool]
        if isinstance(given, str) and given.startswith(PREFIXES):
            created = [*load_mcp_tools(given, time_limit_s)]
        elif isinstance(given, str):
            created = [load_user_tool(given, time_limit_s)]
        elif inspect.ismethod(given):
            created = [MethodTool(name, given, time_limit_s, episodes)]
        elif hasattr(given, "schema"):
            created = [ObjectTool(given, episodes)]
        elif callable(given) and hasattr(given, "__name__"):
            created = [UserTool(f"{name}:{given.__name__}", given, time_limit_s)]
        else:
            raise UserError(
                f"rl.environments: {name}: {given!r} is not a tool: expected a function, class, URL, MCP server or object"
            )
        for tool in created:
            if (model_name := tool_name(tool.schema)) in tools:
                raise UserError(f"rl.environments: {name}: two tools are called {model_name}; rename one")
            tools[model_name] = tool
    return tools
