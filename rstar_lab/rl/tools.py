"""What the model may call. A tool takes JSON arguments and gives an outcome and the text that the model sees."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rstar_lab.outcomes import OURS, Outcome
from rstar_lab.rl.chat import CODE_TOOL, JUPYTER_TOOL, RELEASED_TOOL, render_tool_result
from rstar_lab.sandbox.call import CallResult

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

    async def run(
        self, code: str, stdin: str = "", *, seed: int | None = None, timeout_s: float | None = None,
        memory_mb: int | None = None, session: str | None = None,
    ) -> CallResult: ...  # fmt: skip


class Tool(Protocol):
    schema: dict[str, Any]

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
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}
    for name, value in arguments.items():
        if name not in properties:
            return f"unknown argument '{name}' of {function['name']}; it takes {', '.join(properties)}"
        kind = properties[name].get("type", "string")
        if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean"):
            return f"argument '{name}' of {function['name']} must be a {kind}"
    return None


class CodeTool:
    """The paper's tool: a program and its standard input, in a fresh process."""

    def __init__(self, sandbox: Sandbox, schema: dict[str, Any] = CODE_TOOL):
        self.sandbox, self.schema = sandbox, schema

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult:
        return await run_code(self.sandbox, arguments["code"], arguments["input"], seed=seed)

    async def close(self, traj_id: str) -> None: ...


class JupyterTool:
    """The release's second tool: cells of one live session a trajectory."""

    schema = JUPYTER_TOOL

    def __init__(self, sandbox: Sandbox):
        self.sandbox = sandbox

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult:
        return await run_code(self.sandbox, arguments["code"], "", seed=seed, session=traj_id)

    async def close(self, traj_id: str) -> None:
        close_session = getattr(self.sandbox, "close_session", None)
        if close_session:
            await close_session(traj_id)


async def run_code(sandbox: Sandbox, code: str, stdin: str, *, seed: int, session: str | None = None) -> ToolResult:
    """Run code; a failure of ours is tried again before the model hears of it."""
    for attempt in range(1 + RETRIES):
        result = await sandbox.run(code, stdin, seed=seed, session=session)
        if result.outcome not in OURS:
            break
        await asyncio.sleep(0.05 * 2**attempt)
    return ToolResult(result.outcome, render_tool_result(result), code, result.queue_s, result.duration_s)


def make_tools(names: Sequence[str], sandbox: Sandbox) -> dict[str, Tool]:
    """The tools that a recipe names: python (the paper's), python_released, jupyter."""
    known: dict[str, Tool] = {
        "python": CodeTool(sandbox),
        "python_released": CodeTool(sandbox, RELEASED_TOOL),
        "jupyter": JupyterTool(sandbox),
    }
    return {tool_name(known[name].schema): known[name] for name in names}
