"""Tool calls in the text of a model: one parser for training, analysis and importers. Imports no torch."""

from rstar_lab.tool_calls.call import ToolCall
from rstar_lab.tool_calls.parse import (
    SYNTAXES,
    ParsedTurn,
    Syntax,
    find_syntax,
    parse_stored_calls,
    parse_stored_turn,
    parse_tool_calls,
    parse_turn,
    text_outside_calls,
)

__all__ = [
    "SYNTAXES", "ParsedTurn", "Syntax", "ToolCall", "find_syntax", "parse_stored_calls", "parse_stored_turn",
    "parse_tool_calls", "parse_turn", "text_outside_calls",
]  # fmt: skip
