"""What the model may call. A tool takes JSON arguments and gives an outcome and the text that the model sees."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rstar_lab.outcomes import OURS, Outcome
from rstar_lab.rl.chat import CODE_TOOL, JUPYTER_TOOL, RELEASED_TOOL, render_tool_result
from rstar_lab.sandbox.call import Call, CallResult

RETRIES = 2  # of a call whose failure is ours


@dataclass(frozen=True, slots=True)
class ToolResult:
    outcome: Outcome
    text: str
    code: str = ""
    queue_s: float = 0.0
    run_s: float = 0.0


class Sandbox(Protocol):
    """What is used of LocalSandbox and SandboxClient."""

    async def run_many(self, calls: Sequence[Call]) -> list[CallResult]: ...


class Tool(Protocol):
    @property
    def schema(self) -> dict[str, Any]:
        """Name, description and parameters, as OpenAI's function schema."""
        ...

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult: ...

    async def close(self, traj_id: str) -> None:
        """Forget the state kept for a trajectory that has ended."""


def tool_name(schema: dict[str, Any]) -> str:
    return schema["function"]["name"]


def argument_error(schema: dict[str, Any], arguments: dict[str, Any]) -> str | None:
    """What is wrong with a call's arguments, in words for the model; None where they fit the schema."""
    function = schema["function"]
    properties, required = function["parameters"]["properties"], function["parameters"].get("required", [])
    for name in required:
        if name not in arguments:
            return f"missing argument '{name}' of {function['name']}"
    kinds: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
    }
    for name, value in arguments.items():
        if name not in properties:
            return f"unknown argument '{name}' of {function['name']}; it takes {', '.join(properties)}"
        kind = properties[name].get("type", "string")
        if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean"):
            return f"argument '{name}' of {function['name']} must be a {kind}"
    return None


@dataclass(frozen=True, slots=True)
class CodeTool:
    """The paper's tool: a program and its standard input, in a fresh process."""

    sandbox: Sandbox
    timeout_s: float | None = None
    memory_mb: int | None = None
    schema: dict[str, Any] = field(default_factory=lambda: CODE_TOOL)

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult:
        call = Call(arguments["code"], arguments["input"], seed, self.timeout_s, self.memory_mb)
        return await run_code(self.sandbox, call)

    async def close(self, traj_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class JupyterTool:
    """The release's second tool: cells of one live session a trajectory."""

    sandbox: Sandbox
    timeout_s: float | None = None
    memory_mb: int | None = None
    schema: dict[str, Any] = field(default_factory=lambda: JUPYTER_TOOL)

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult:
        call = Call(arguments["code"], "", seed, self.timeout_s, self.memory_mb, session=traj_id)
        return await run_code(self.sandbox, call)

    async def close(self, traj_id: str) -> None:
        close_session = getattr(self.sandbox, "close_session", None)
        if close_session:
            await close_session(traj_id)


async def run_code(sandbox: Sandbox, call: Call) -> ToolResult:
    """Run code; a failure of ours is tried again before the model hears of it."""
    for attempt in range(1 + RETRIES):
        (result,) = await sandbox.run_many([call])
        if result.outcome not in OURS:
            break
        await asyncio.sleep(0.05 * 2**attempt)
    return ToolResult(result.outcome, render_tool_result(result), call.code, result.queue_s, result.duration_s)


def make_tools(
    names: Sequence[str], sandbox: Sandbox, timeout_s: float | None = None, memory_mb: int | None = None
) -> dict[str, Tool]:
    """The tools that a recipe names: python (the paper's), python_released, jupyter."""
    known: dict[str, Tool] = {
        "python": CodeTool(sandbox, timeout_s, memory_mb),
        "python_released": CodeTool(sandbox, timeout_s, memory_mb, RELEASED_TOOL),
        "jupyter": JupyterTool(sandbox, timeout_s, memory_mb),
    }
    return {tool_name(known[name].schema): known[name] for name in names}
