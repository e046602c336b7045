"""Tool calls in the text of a model: one parser for training, analysis and importers. Imports no torch."""

from rstar_lab.tool_calls.call import ToolCall
from rstar_lab.tool_calls.parse import (
    SYNTAXES,
    Syntax,
    find_syntax,
    parse_stored_calls,
    parse_tool_calls,
    reasoning_end,
    text_outside_calls,
)

__all__ = [
    "SYNTAXES",
    "Syntax",
    "ToolCall",
    "find_syntax",
    "parse_stored_calls",
    "parse_tool_calls",
    "reasoning_end",
    "text_outside_calls",
]
