"""What the model may call. A tool takes JSON arguments and gives an outcome and the text that the model sees."""

from collections.abc import Sequence

from rstar_lab.errors import UserError
from rstar_lab.rl.chat_format import released
from rstar_lab.rl.chat_format.formats import PromptFormat, code_tool_schema
from rstar_lab.rl.chat_format.template import render_tool_result
from rstar_lab.rl.recipe import CODE_TOOLS
from rstar_lab.rl.tools.base import Tool, tool_name
from rstar_lab.rl.tools.code import CodeTool, JupyterTool, Sandbox
from rstar_lab.rl.tools.user import load_user_tool


def make_tools(
    names: Sequence[str],
    sandbox: Sandbox | None,
    timeout_s: float | None = None,
    memory_mb: int | None = None,
    *,
    own_timeout_s: float = 30.0,
    prompt_format: PromptFormat = "paper",
) -> dict[str, Tool]:
    """The tools that a recipe names: python (the paper's), python_released, jupyter, or the user's own (own_tools.py).

    sandbox: None where none of `CODE_TOOLS` is among them. own_timeout_s: of a call of an own tool. Raises UserError.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        if name in CODE_TOOLS:
            assert sandbox is not None
            kind = JupyterTool if name == "jupyter" else CodeTool
            render = released.render_result if prompt_format == "released" else render_tool_result
            schema = code_tool_schema(name, prompt_format)
            tool: Tool = kind(sandbox, timeout_s, memory_mb, schema, render)
        else:
            tool = load_user_tool(name, own_timeout_s)
        if (told := tool_name(tool.schema)) in tools:
            raise UserError(f"rl.tools: {name}: the model sees two tools called {told}; give one another name")
        tools[told] = tool
    return tools
