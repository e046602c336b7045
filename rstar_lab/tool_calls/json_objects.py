"""Tool calls of Llama 3.1 and later: JSON objects `{"name": ..., "parameters": {...}}`, separated by `;`."""

import json
import re
from typing import Any

from rstar_lab.tool_calls.call import Schemas, ToolCall

PYTHON_TAG = "<|python_tag|>"
_SPACE = re.compile(r"\s*")
_CALL = re.compile(r'\{\s*"(?:type|name)"\s*:')
_NEXT_CALL = re.compile(r'\s*+;?\s*+(?:<\|python_tag\|>)?\s*+(?=\{\s*"(?:type|name)"\s*:)')
_LATER_CALL = re.compile(r'\n[ \t]*+(?:<\|python_tag\|>)?[ \t]*+(?=\{\s*"(?:type|name)"\s*:)')
_NAMES_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"')


def parse_json_objects(text: str, schemas: Schemas, start: int = 0) -> list[ToolCall]:
    """Return all calls of a turn from `start`, in order. A call that cannot be parsed is returned with its error.

    The turn consists of calls, or its calls follow `<|python_tag|>`. Text after the calls is no call, and neither is a
    JSON object without a name and arguments, which is an answer.
    """
    begin = _SPACE.match(text, start).end()  # type: ignore[union-attr]
    if not _CALL.match(text, begin):
        tag = text.find(PYTHON_TAG, begin)
        if tag < 0:
            return []
        begin = tag
    calls: list[ToolCall] = []
    while True:
        tagged = text.startswith(PYTHON_TAG, begin)
        body = begin + len(PYTHON_TAG) * tagged
        body = _SPACE.match(text, body).end()  # type: ignore[union-attr]
        call = _call(text, begin, body, tagged)
        if call is not None:
            calls.append(call)
        if call is None or (call.error and call.end == len(text)):
            return calls
        following = _NEXT_CALL.match(text, call.end) or _LATER_CALL.search(text, call.end)
        if not following:
            return calls
        begin = following.start() + len(following[0]) - len(following[0].lstrip("; \t\r\n"))


def _call(text: str, start: int, body: int, tagged: bool) -> ToolCall | None:
    """Return the call whose JSON begins at `body`; None if it is an object of another kind."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, body)
    except RecursionError:
        return ToolCall(None, None, "The tool call is nested too deeply.", text[body:], start, len(text))
    except ValueError as error:
        raw = text[body:]
        if not tagged and not _NAMES_ARGUMENTS.search(raw) and "}" in raw:
            return None
        return ToolCall(None, None, f"The tool call is not valid JSON: {error}", raw, start, len(text), closed=False)
    raw = text[body:end]
    name = value.get("name") if isinstance(value, dict) else None
    arguments: Any = None
    if isinstance(value, dict):
        arguments = value.get("parameters", value.get("arguments"))
        if not tagged and (not isinstance(name, str) or not {"parameters", "arguments"} & value.keys()):
            return None
    if not isinstance(name, str) or not name:
        error_text = 'The tool call must be a JSON object with "name" and "parameters".'
        return ToolCall(None, None, error_text, raw, start, end)
    if not isinstance(arguments, dict):
        return ToolCall(name, None, 'The "parameters" of the tool call must be a JSON object.', raw, start, end)
    return ToolCall(name, arguments, None, raw, start, end)
