"""Tool calls of GLM 4.5 and later: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`.

The format escapes nothing. A tag ends a value only where the format goes on after it.
"""

import re
from typing import Any

from rstar_lab.tool_calls.call import TAGS, ReadAhead, Schemas, ToolCall, read_value

_NAME = re.compile(r"\s*([\w.:-]+)\s*(?=<arg_key>|</tool_call>|\Z)")
_KEY = re.compile(r"\s*<arg_key>([^<]{0,256})</arg_key>\s*<arg_value>")
_TOKEN = re.compile(
    r"(?P<next><tool_call>[\w.:-]+\s*<arg_key>)"
    r"|(?P<value></arg_value>)(?=\s*(?:<arg_key>[^<]*</arg_key>\s*<arg_value>|</tool_call>|\Z))"
    r"|</tool_call>(?P<last>\s*(?:(?=<tool_call>)|\Z))?"
)
_MAX_NESTING = 8  # calls inside a value
_CALL_END = re.compile(r"\s*</tool_call>")


def parse_glm(text: str, schemas: Schemas, start: int = 0) -> list[ToolCall]:
    """Return all calls of a turn from `start`, in order. A call that cannot be parsed is returned with its error.

    The last value may lack its `</arg_value>`. Values of other types than string are read by the schema of the tool.
    """
    ahead = ReadAhead(text)
    return TAGS.find_calls(text, start, lambda position: _call(ahead, position, schemas))


def _call(ahead: ReadAhead, start: int, schemas: Schemas) -> ToolCall:
    text, body = ahead.text, start + len(TAGS.opening)
    name = _NAME.match(text, body)
    if name is None:
        return TAGS.malformed(text, start, TAGS.behind_next(text, body), None, "The tool call has no name of a tool.")
    arguments: dict[str, Any] = {}
    position = name.end()
    while key := _KEY.match(text, position):
        end, position = _value_end(ahead, key.end())
        if end is None:
            error = "The tool call has no closing </arg_value>."
            return TAGS.malformed(text, start, TAGS.behind_next(text, body), name[1], error)
        arguments[key[1]] = read_value(text[key.end() : end], name[1], key[1], schemas)
    close = _CALL_END.match(text, position)
    if close is None:
        error = "The tool call has no closing </tool_call>."
        return TAGS.malformed(text, start, TAGS.behind_next(text, position), name[1], error)
    return ToolCall(name[1], arguments, None, text[body:position], start, close.end())


def _value_end(ahead: ReadAhead, start: int) -> tuple[int | None, int]:
    """Return (end of the value, where the format goes on), or (None, start) if the value has no end.

    A complete call inside a value belongs to the value.
    """
    depth = 0
    for token in ahead.matches(_TOKEN, start):
        if token["next"]:
            depth += 1
            if depth > _MAX_NESTING:
                break
        elif token["value"]:
            if not depth:
                return token.start(), token.end()
        elif depth:
            depth -= 1
        elif token["last"] is not None:
            return token.start(), token.start()
    return None, start
