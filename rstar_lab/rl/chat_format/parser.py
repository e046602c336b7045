"""Parse the tool calls and answers that a model writes."""

import json
import re
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


_TAG = re.compile(r"</?tool_call>")


_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"(\w{1,64})"')


# A whole JSON string (or one that never ends), a tag, or a backslash, which JSON knows inside strings only.
_STRING_OR_TAG = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|</?tool_call>|\\', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a turn. Either `arguments` or `error` is None; `raw` is the text between the tags."""

    name: str | None
    arguments: dict[str, Any] | None
    error: str | None
    raw: str


def parse_tool_calls(text: str) -> list[ToolCall]:
    """All calls in one assistant turn, in order; one that cannot be read comes with its error and is never dropped.

    A call is one JSON object with a string `name` and an object `arguments` between `<tool_call>` and `</tool_call>`.
    Tags inside a JSON string belong to the string. Runs in time linear in the text, whatever the text.
    """
    calls = []
    position = text.find(_OPEN)
    while position >= 0:
        start = position + len(_OPEN)
        end = _json_end(text, start)
        value, error = _decode(text[start:end]) if end is not None else (None, "")
        if end is None or (error and _OPEN in text[start:end]):
            # No JSON with well-ended strings: take the tags as they stand, lest the next call be swallowed.
            tag = _TAG.search(text, start)
            end = tag.start() if tag else len(text)
            if tag and tag[0] == _CLOSE:
                value, error = _decode(text[start:end])
            else:
                error = "The tool call has no closing </tool_call>."
        calls.append(_call(value, error, text[start:end]))
        position = text.find(_OPEN, end)
    return calls


def _json_end(text: str, start: int) -> int | None:
    """Where the closing tag outside of JSON strings begins; None if another tag, a stray backslash or the end comes
    first."""
    for match in _STRING_OR_TAG.finditer(text, start):
        if match[0] == _CLOSE:
            return match.start()
        if match[0][0] != '"':
            return None
    return None


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _decode(raw: str) -> tuple[Any, str | None]:
    """(the JSON value, None) or (None, what is wrong)."""
    try:
        value = json.loads(raw, parse_constant=_reject_constant)
        # A lone surrogate is an escape that stands for no character: no process could be handed it.
        if "\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        return None, "The tool call is nested too deeply."
    except ValueError as error:
        return None, f"The tool call is not valid JSON: {error}"
    return value, None


def _call(value: Any, error: str | None, raw: str) -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    if error:
        match = _NAME.match(raw)
        return ToolCall(match[1] if match else None, None, error, raw)
    if not isinstance(value, dict):
        return ToolCall(None, None, "The tool call must be a JSON object with name and arguments.", raw)
    if not isinstance(name, str) or not name:
        return ToolCall(None, None, 'The tool call has no "name".', raw)
    if "arguments" not in value:
        return ToolCall(name, None, 'The tool call has no "arguments".', raw)
    if not isinstance(value["arguments"], dict):
        return ToolCall(name, None, 'The "arguments" of the tool call must be a JSON object.', raw)
    return ToolCall(name, value["arguments"], None, raw)


def count_answers(text: str) -> int:
    """The number of `<answer>…</answer>` in the model's own text; 0 where opening and closing tags do not pair up.

    That is what `roc.format_penalty` wants: a stray tag is no format.
    """
    tags = re.findall(r"</?answer>", text)
    paired = len(tags) % 2 == 0 and all(tag == "<answer>" for tag in tags[::2]) and "<answer>" not in tags[1::2]
    return len(tags) // 2 if paired else 0
