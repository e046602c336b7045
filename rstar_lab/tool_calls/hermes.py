"""Tool calls in the Hermes format (Qwen2.5, Qwen3 and the formats of the paper): JSON in `<tool_call>` tags."""

import json
import re
from typing import Any

from rstar_lab.tool_calls.call import TAGS, Schemas, ToolCall, decode_json, reject_constant

_OPEN, _CLOSE = TAGS.opening, TAGS.closing
_TAG = re.compile(r"</?tool_call>")
_UNOPENED = re.compile(r'^[ \t]*(?=\{\s*"name"\s*:)', re.MULTILINE)
_OBJECT_START = re.compile(r"[ \t\n\r]*+\{")
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"(\w{1,64})"')
# A JSON string (terminated or not), a tag, or a backslash, which JSON allows inside strings only.
_STRING_OR_TAG = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|</?tool_call>|\\', re.DOTALL)


def parse_hermes(text: str, schemas: Schemas, start: int = 0) -> list[ToolCall]:
    """Return all calls of a turn from `start`, in order. A call that cannot be parsed is returned with its error.

    A call is one JSON object with a string `name` and an object `arguments` between `<tool_call>` and `</tool_call>`.
    Tags inside a JSON string belong to the string. Strings may contain lone surrogates, which JSON can escape; they cannot
    be encoded as UTF-8. The run time is linear in the length of the text.
    """
    calls = []
    first, position = start, text.find(_OPEN, start)
    while position >= 0:
        start = position + len(_OPEN)
        end, closed = _json_end(text, start)
        value, error = decode_json(text[start:end]) if closed else (None, "")
        if not closed or (error and _OPEN in text[start:end]):
            # A string without an end would include the next call: end this call at the nearest tag. Tags inside a
            # complete JSON object are part of its strings.
            tag = _TAG.search(text, start + _objects_length(text[start:end]))
            end = tag.start() if tag else len(text)
            if tag and tag[0] == _CLOSE:
                value, error = decode_json(text[start:end])
            else:
                error = "The tool call has no closing </tool_call>."
        closed = text.startswith(_CLOSE, end)
        name, arguments, error = _call(value, error, text[start:end])
        behind = end + len(_CLOSE) * closed
        calls.append(ToolCall(name, arguments, error, text[start:end], position, behind, closed))
        position = text.find(_OPEN, end)
    unopened = _calls_without_opening_tag(text, calls, first)
    return sorted([*calls, *unopened], key=lambda call: call.start) if unopened else calls


def _calls_without_opening_tag(text: str, calls: list[ToolCall], start: int) -> list[ToolCall]:
    """Return the JSON objects on lines of their own that only have the closing tag, as errors."""
    found = []
    for begin, end in zip(
        [start, *(call.end for call in calls)], [*(call.start for call in calls), len(text)], strict=True
    ):
        while (close := text.find(_CLOSE, begin, end)) >= 0:
            objects = list(_UNOPENED.finditer(text, begin, close))
            if objects:
                raw = text[objects[-1].end() : close]
                name, _, error = _call(*decode_json(raw), raw)
                if error is None:
                    error = "The tool call has no opening <tool_call>."
                    found.append(ToolCall(name, None, error, raw, objects[-1].end(), close + len(_CLOSE)))
            begin = close + len(_CLOSE)
    return found


def _json_end(text: str, start: int) -> tuple[int, bool]:
    """Return (start of the first closing tag outside of JSON strings, True). If an opening tag, a backslash or the end of
    the text comes first, return its position and False."""
    for match in _STRING_OR_TAG.finditer(text, start):
        if match[0][0] != '"':
            return match.start(), match[0] == _CLOSE
    return len(text), False


_DECODER = json.JSONDecoder(parse_constant=reject_constant)


def _objects_length(raw: str) -> int:
    """Return the length of the complete JSON objects at the start of `raw`; 0 if there is none."""
    end = 0
    while match := _OBJECT_START.match(raw, end):
        try:
            end = _DECODER.raw_decode(raw, match.end() - 1)[1]
        except (RecursionError, ValueError):
            break
    return end


def _call(value: Any, error: str | None, raw: str) -> tuple[str | None, dict[str, Any] | None, str | None]:
    """Return name, arguments and error of a call."""
    name = value.get("name") if isinstance(value, dict) else None
    if error:
        match = _NAME.match(raw)
        return match[1] if match else None, None, error
    if not isinstance(value, dict):
        return None, None, "The tool call must be a JSON object with name and arguments."
    if not isinstance(name, str) or not name:
        return None, None, 'The tool call has no "name".'
    if "arguments" not in value:
        return name, None, 'The tool call has no "arguments".'
    if not isinstance(value["arguments"], dict):
        return name, None, 'The "arguments" of the tool call must be a JSON object.'
    return name, value["arguments"], None
