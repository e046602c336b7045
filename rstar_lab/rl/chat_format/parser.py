"""Parser of the tool calls that a model writes, in the Hermes format: JSON in `<tool_call>` tags."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rstar_lab.verify import AnswerFormat, extract_answer

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(r"</?tool_call>")
_OBJECT_START = re.compile(r"[ \t\n\r]*+\{")
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"(\w{1,64})"')
# A JSON string (terminated or not), a tag, or a backslash, which JSON allows inside strings only.
_STRING_OR_TAG = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|</?tool_call>|\\', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a turn. Either `arguments` or `error` is None; `raw` is the text between the tags."""

    name: str | None
    arguments: dict[str, Any] | None
    error: str | None
    raw: str


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Return all calls of one assistant turn, in order. A call that cannot be parsed is returned with its error.

    A call is one JSON object with a string `name` and an object `arguments` between `<tool_call>` and `</tool_call>`.
    Tags inside a JSON string belong to the string. Strings may contain lone surrogates, which JSON can escape; they cannot
    be encoded as UTF-8. The run time is linear in the length of the text.
    """
    calls = []
    position = text.find(_OPEN)
    while position >= 0:
        start = position + len(_OPEN)
        end, closed = _json_end(text, start)
        value, error = _decode(text[start:end]) if closed else (None, "")
        if not closed or (error and _OPEN in text[start:end]):
            # A string without an end would include the next call: end this call at the nearest tag. Tags inside a
            # complete JSON object are part of its strings.
            tag = _TAG.search(text, start + _objects_length(text[start:end]))
            end = tag.start() if tag else len(text)
            if tag and tag[0] == _CLOSE:
                value, error = _decode(text[start:end])
            else:
                error = "The tool call has no closing </tool_call>."
        calls.append(_call(value, error, text[start:end]))
        position = text.find(_OPEN, end)
    return calls


def is_void_turn(text: str, calls: Sequence[ToolCall], answer_format: AnswerFormat = "tagged") -> bool:
    """Return whether an assistant turn has neither a well-formed tool call nor a final answer. calls: those in its text.

    Source: SimpleTIR (arXiv 2509.02479), section 3.3.
    """
    return extract_answer(text, answer_format) is None and all(call.error for call in calls)


def text_outside_calls(text: str, calls: Sequence[ToolCall]) -> str:
    """Return what an assistant turn contains besides its calls. calls: those in its text, written in `<tool_call>` tags.

    A well-formed call is left out with its tags. Of a malformed call, only the tags are left out; a call that another
    opening tag interrupts keeps its tag.
    """
    pieces, position = [], 0
    for call in calls:
        start = text.index(_OPEN + call.raw, position)
        end = start + len(_OPEN) + len(call.raw)
        closed = text.startswith(_CLOSE, end)
        pieces.append(text[position:start])
        if not closed and end < len(text):
            pieces.append(_OPEN)
        if call.error:
            pieces.append(call.raw)
        position = end + len(_CLOSE) * closed
    return "".join([*pieces, text[position:]])


def _json_end(text: str, start: int) -> tuple[int, bool]:
    """Return (start of the first closing tag outside of JSON strings, True). If an opening tag, a backslash or the end of
    the text comes first, return its position and False."""
    for match in _STRING_OR_TAG.finditer(text, start):
        if match[0][0] != '"':
            return match.start(), match[0] == _CLOSE
    return len(text), False


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _decode(raw: str) -> tuple[Any, str | None]:
    """Return (JSON value, None) or (None, error message)."""
    try:
        value = _DECODER.decode(raw)
    except RecursionError:
        return None, "The tool call is nested too deeply."
    except ValueError as error:
        return None, f"The tool call is not valid JSON: {error}"
    return value, None


def _objects_length(raw: str) -> int:
    """Return the length of the complete JSON objects at the start of `raw`; 0 if there is none."""
    end = 0
    while match := _OBJECT_START.match(raw, end):
        try:
            end = _DECODER.raw_decode(raw, match.end() - 1)[1]
        except (RecursionError, ValueError):
            break
    return end


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
    """Return the number of `<answer>…</answer>` in the model's text; 0 if opening and closing tags do not match."""
    tags = re.findall(r"</?answer>", text)
    paired = len(tags) % 2 == 0 and all(tag == "<answer>" for tag in tags[::2]) and "<answer>" not in tags[1::2]
    return len(tags) // 2 if paired else 0
