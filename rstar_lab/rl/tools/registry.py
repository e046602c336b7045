"""Creates the tools that a recipe names."""

from collections.abc import Sequence

from rstar_lab.common.errors import UserError
from rstar_lab.rl.recipe import CODE_TOOLS
from rstar_lab.rl.renderers.base import PromptFormat
from rstar_lab.rl.renderers.formats import renderer_type
from rstar_lab.rl.tools.base import Tool, tool_name
from rstar_lab.rl.tools.code import CodeTool, FaultySandbox, JupyterTool, Sandbox
from rstar_lab.rl.tools.mcp import PREFIXES, load_mcp_tools
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
    tools: dict[str, Tool] = {}
    for name in names:
        new_tools: list[Tool]
        if name in CODE_TOOLS:
            assert sandbox is not None
            kind = JupyterTool if name == "jupyter" else CodeTool
            renderer = renderer_type(prompt_format)
            new_tools = [kind(sandbox, timeout_s, memory_mb, renderer.code_tool(name), renderer.result_text)]
        elif name.startswith(PREFIXES):
            new_tools = [*load_mcp_tools(name, user_timeout_s)]
        else:
            new_tools = [load_user_tool(name, user_timeout_s)]
        for tool in new_tools:
            if (model_name := tool_name(tool.schema)) in tools:
                raise UserError(f"rl.tools: {name}: two tools are called {model_name}; rename one")
            tools[model_name] = tool
    return tools
