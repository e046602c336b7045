"""Syntaxes in which models write tool calls, other than the project's own (`parser.py`).

`find_syntax` detects the syntax of a model: its chat template renders a call, and the parser that returns this call has
the syntax.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rstar_lab.rl.chat_format.parser import ToolCall, parse_tool_calls

Syntax = Literal["hermes", "function_tags", "json"]
Schemas = Mapping[str, Mapping[str, Any]]  # function schemas, by the name of the tool

PYTHON_TAG = "<|python_tag|>"
_JSON_CALL = re.compile(r'\{\s*"(?:type|name)"\s*:')
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def parse_function_tags(text: str, schemas: Schemas) -> list[ToolCall]:
    """Return the calls of a turn written as `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`
    (Qwen3-Coder, Qwen3.5). Values of parameters that are not strings in the schema are read as JSON."""
    return [_function_call(match[1], bool(match[2]), schemas) for match in _BLOCK.finditer(text)]


def _function_call(block: str, closed: bool, schemas: Schemas) -> ToolCall:
    opening = _FUNCTION.match(block)
    if not opening:
        return ToolCall(None, None, "The tool call has no <function=NAME>.", block)
    name, position, arguments = opening[1], opening.end(), {}
    properties = schemas.get(name, {}).get("function", {}).get("parameters", {}).get("properties", {})
    while match := _PARAMETER.match(block, position):
        arguments[match[1]] = _value(match[2], properties.get(match[1], {}))
        position = match.end()
    if not closed or block[position:].strip() != "</function>":
        return ToolCall(name, None, "The tool call has no closing </parameter>, </function> or </tool_call>.", block)
    return ToolCall(name, arguments, None, block)


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type", "string") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # the check of the arguments rejects it with an error for the model


def parse_json_calls(text: str, schemas: Schemas) -> list[ToolCall]:
    """Return the calls of a turn that consists of JSON objects `{"name": ..., "parameters": {...}}`, separated by `;`, after
    an optional `<|python_tag|>` (Llama 3.1 and later). A turn that begins with other text has no call."""
    body = text.strip()
    tagged = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG).lstrip()
    if not tagged and not _JSON_CALL.match(body):
        return []
    calls: list[ToolCall] = []
    while body or not calls:
        try:
            value, end = json.JSONDecoder().raw_decode(body)
        except RecursionError:
            return [*calls, ToolCall(None, None, "The tool call is nested too deeply.", body)]
        except ValueError as error:
            return [*calls, ToolCall(None, None, f"The tool call is not valid JSON: {error}", body)]
        calls.append(_json_call(value, body[:end]))
        body = body[end:].lstrip("; \n")
    return calls


def _json_call(value: Any, raw: str) -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ToolCall(None, None, 'The tool call must be a JSON object with "name" and "parameters".', raw)
    arguments = value.get("parameters", value.get("arguments"))
    if not isinstance(arguments, dict):
        return ToolCall(name, None, 'The "parameters" of the tool call must be a JSON object.', raw)
    return ToolCall(name, arguments, None, raw)


PARSERS: dict[Syntax, Callable[[str, Schemas], list[ToolCall]]] = {
    "hermes": lambda text, schemas: parse_tool_calls(text),
    "function_tags": parse_function_tags,
    "json": parse_json_calls,
}


def find_syntax(rendered: str, name: str, arguments: Mapping[str, Any]) -> Syntax | None:
    """Return the syntax of the one call in a rendered turn, or None if no parser reads it back."""
    for syntax, parse in PARSERS.items():
        calls = parse(rendered, {})
        if [(call.name, call.arguments) for call in calls] == [(name, arguments)]:
            return syntax
    return None


def parse_stored_calls(text: str) -> list[ToolCall]:
    """Return the calls of a stored turn whose syntax is not known: those of the first parser that finds a well-formed call."""
    calls: Sequence[ToolCall] = parse_tool_calls(text)
    for parse in (parse_function_tags, parse_json_calls):
        if any(call.error is None for call in calls):
            break
        calls = parse(text, {}) or calls
    return list(calls)
