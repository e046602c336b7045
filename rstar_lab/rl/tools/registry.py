"""Creates the tools that a recipe names."""

from collections.abc import Sequence

from rstar_lab.common.errors import UserError
from rstar_lab.rl.recipe import CODE_TOOLS
from rstar_lab.rl.recipe.rl import TOOL_ADDRESSES
from rstar_lab.rl.renderers.base import PromptFormat
from rstar_lab.rl.renderers.formats import renderer_type
from rstar_lab.rl.tools.base import Tool, tool_name
from rstar_lab.rl.tools.code import CodeTool, FaultySandbox, Sandbox
from rstar_lab.rl.tools.mcp import load_mcp_tools
from rstar_lab.rl.tools.user import load_user_tool


def make_tools(
    names: Sequence[str],
    sandbox: Sandbox | None,
    timeout_s: float | None = None,
    memory_mb: int | None = None,
    *,
    user_timeout_s: float = 30.0,
    prompt_format: PromptFormat = "paper",
    fault_share: float = 0.0,
) -> dict[str, Tool]:
    """Return the tools that a recipe names, by the name that the model uses.

    names: python (paper), python_released, jupyter, MCP servers (see `mcp`), or user tools (see `user`). sandbox: may be None
    if there is no code tool. timeout_s, memory_mb: limits of one call of a code tool; None: those of the sandbox.
    user_timeout_s: time limit of one call of a user tool. fault_share: see `code.FaultySandbox`. Raises UserError for two tools with
    the same name.
    """
    if sandbox is not None and fault_share:
        sandbox = FaultySandbox(sandbox, fault_share)
    tools: list[Tool] = []
    for name in names:
        if name in CODE_TOOLS:
            assert sandbox is not None
            renderer = renderer_type(prompt_format)
            sessions: dict[str, str] | None = {} if name == "jupyter" else None
            schema = renderer.code_tool(name)
            tools.append(CodeTool(sandbox, timeout_s, memory_mb, schema, renderer.result_text, sessions))
        else:
            tools += load_tools(name, user_timeout_s)
    return by_name(tools, "rl.tools")


def load_tools(name: str, time_limit_s: float) -> Sequence[Tool]:
    """Return the tools that a text names: those of an MCP server, or one of the user. Raises UserError."""
    return (
        load_mcp_tools(name, time_limit_s) if name.startswith(TOOL_ADDRESSES) else [load_user_tool(name, time_limit_s)]
    )


def by_name(tools: Sequence[Tool], where: str) -> dict[str, Tool]:
    """Return tools by the name that the model uses. Raises UserError, which starts with `where`, for two with the same name."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if found.setdefault(name := tool_name(tool.schema), tool) is not tool:
            raise UserError(f"{where}: two tools are called {name}; rename one")
    return found
