"""Tool calls of gpt-oss (Harmony): messages whose header has a recipient, `to=functions.NAME`, and whose content is JSON.

A turn is a sequence of messages `<|start|>assistant HEADER<|message|>CONTENT<|end|>`; the first `<|start|>assistant` belongs
to the prompt. Reasoning is in the channel `analysis`.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from rstar_lab.tool_calls.call import Schemas, ToolCall, decode_json

_START = "<|start|>assistant"
_START_OR_MESSAGE = re.compile(r"<\|start\|>assistant|<\|message\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_END = re.compile(r"<\|(?:end|call|return)\|>(?=\s*(?:<\|start\|>|\Z))|(?=<\|start\|>assistant)|\Z")
# A JSON string (terminated or not), a backslash, or what ends the content of a call outside of strings.
_STRING_OR_END = re.compile(rf'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|\\|<\|(?:end|call)\|>|{_END.pattern}', re.DOTALL)
_STOP = re.compile(r"\s*<\|(?:end|call|return)\|>")


class Message(NamedTuple):
    """A message of a turn. start, end: with its marks; body, body_end: its content."""

    start: int
    header: str
    body: int
    body_end: int
    end: int


def messages(text: str, start: int = 0) -> Iterator[Message]:
    """Yield the messages of a turn. A header without content has body == body_end == end.

    The content of a call ends with its JSON value, so marks inside a JSON string belong to the string.
    """
    position = start
    while position < len(text):
        mark = _START_OR_MESSAGE.search(text, position + text.startswith(_START, position))
        if mark is None or mark[0] == _START:
            end = mark.start() if mark else len(text)
            yield Message(position, text[position:end], end, end, end)
            position = end
            continue
        header, body = text[position : mark.start()], mark.end()
        match = (_RECIPIENT.search(header) and _end_of_json(text, body)) or _END.search(text, body)
        assert match is not None  # the end of the text matches
        yield Message(position, header, body, match.start(), match.end())
        position = max(match.end(), position + 1)


def _end_of_json(text: str, body: int) -> re.Match[str] | None:
    """Return the first mark outside of JSON strings; None if the text before it is not JSON."""
    match = next((match for match in _STRING_OR_END.finditer(text, body) if match[0][:1] != '"'), None)
    with suppress(ValueError, RecursionError):
        json.loads(text[body : match.start() if match else len(text)])
        return match
    return None


def parse_harmony(text: str, schemas: Schemas, start: int = 0) -> list[ToolCall]:
    """Return all calls of a turn from `start`, in order. A call that cannot be parsed is returned with its error."""
    calls: list[ToolCall] = []
    for message in messages(text, start):
        recipient = _RECIPIENT.search(message.header)
        if recipient is None or recipient[1] == "assistant":
            continue
        name, raw = recipient[1].removeprefix("functions."), text[message.body : message.body_end]
        arguments, error = decode_json(raw, "The arguments of the tool call are")
        if error is None and not isinstance(arguments, dict):
            arguments, error = None, "The arguments of the tool call must be a JSON object."
        if name == recipient[1]:
            arguments, error = None, f"The recipient {name} is not a function; functions are called as functions.NAME."
        elif message.body == message.end:
            arguments, error = None, "The tool call has no <|message|>."
        stop = _STOP.match(text, message.body_end)
        end = stop.end() if stop else message.end
        calls.append(
            ToolCall(
                name, arguments, error, raw.rstrip() or message.header, message.start, end, bool(stop) or not error
            )
        )
    return calls


def reasoning_of(text: str) -> tuple[tuple[int, int], int]:
    """Return the offsets of the content of the first message if it is reasoning, and the offset behind the message."""
    first = next(messages(text), None)
    if first is None or "<|channel|>analysis" not in first.header or _RECIPIENT.search(first.header):
        return (0, 0), 0
    return (first.body, first.body_end), first.end
