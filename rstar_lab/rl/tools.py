"""What the model may call. A tool takes JSON arguments and gives an outcome and the text that the model sees."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rstar_lab.errors import UserError
from rstar_lab.outcomes import OURS, Outcome
from rstar_lab.rl.chat import CODE_TOOL, JUPYTER_TOOL, RELEASED_TOOL, render_tool_result
from rstar_lab.rl.recipe import CODE_TOOLS
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
        if not isinstance(kind, str) or (value is None and properties[name].get("nullable")):
            continue  # one of several types: for the tool itself to say
        if not isinstance(value, kinds.get(kind, object)) or (
            isinstance(value, bool) and kind in ("integer", "number")
        ):
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
    names: Sequence[str],
    sandbox: Sandbox | None,
    timeout_s: float | None = None,
    memory_mb: int | None = None,
    *,
    own_timeout_s: float = 30.0,
) -> dict[str, Tool]:
    """The tools that a recipe names: python (the paper's), python_released, jupyter, or the user's own (own_tools.py).

    sandbox: None where none of `CODE_TOOLS` is among them. own_timeout_s: of a call of an own tool. Raises UserError.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        if name in CODE_TOOLS:
            assert sandbox is not None
            schemas = {"python": CODE_TOOL, "python_released": RELEASED_TOOL}
            tool: Tool = JupyterTool(sandbox, timeout_s, memory_mb)
            if name in schemas:
                tool = CodeTool(sandbox, timeout_s, memory_mb, schemas[name])
        else:
            from rstar_lab.rl.own_tools import own_tool

            tool = own_tool(name, own_timeout_s)
        if (told := tool_name(tool.schema)) in tools:
            raise UserError(f"rl.tools: {name}: the model sees two tools called {told}; give one another name")
        tools[told] = tool
    return tools
