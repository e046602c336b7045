"""Tool calls of Gemma 4: `<|tool_call>call:NAME{key:value,...}<tool_call|>`, with strings between `<|"|>` marks."""

import json
import re
from typing import Any

from rstar_lab.tool_calls.call import WORDS, Schemas, Tags, ToolCall

_TAGS, _QUOTE = Tags("<|tool_call>", "<tool_call|>"), '<|"|>'
_NAME = re.compile(r"\s*call:([^\s{}<]+)\s*(?=\{)")
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r'true|false|null|True|False|None|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|"(?:[^"\\]|\\.)*+"', re.DOTALL)
_KEY = re.compile(r'[^:{}\[\],<"]+(?=:)')
_MAX_DEPTH = 100


class _Malformed(ValueError):
    """The arguments do not have the format."""


def parse_gemma4(text: str, schemas: Schemas, start: int = 0) -> list[ToolCall]:
    """Return all calls of a turn from `start`, in order. A call that cannot be parsed is returned with its error.

    Marks inside a string belong to the string.
    """
    return _TAGS.find_calls(text, start, lambda position: _call(text, position))


def _call(text: str, start: int) -> ToolCall:
    body = start + len(_TAGS.opening)
    name = _NAME.match(text, body)
    try:
        if name is None:
            raise _Malformed("no call:NAME{")
        arguments, end = _value(text, name.end(), 0)
        if not text.startswith(_TAGS.closing, end):
            raise _Malformed(f"no closing {_TAGS.closing}")
    except _Malformed as error:
        message = f"The tool call is malformed: {error}."
        return _TAGS.malformed(text, start, _TAGS.behind_next(text, body), name[1] if name else None, message)
    return ToolCall(name[1], arguments, None, text[body:end], start, end + len(_TAGS.closing))


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return the value at `at`, and the offset behind it."""
    if depth > _MAX_DEPTH:
        raise _Malformed("it is nested too deeply")
    at = _skip(text, at)
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise _Malformed("a string has no end")
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text[at : at + 1] in ("{", "["):
        return _items(text, at, depth)
    word = _WORD.match(text, at)
    if word is None:
        raise _Malformed(f"no value at {text[at : at + 20]!r}")
    if word[0] in WORDS:
        return WORDS[word[0]], word.end()
    try:
        return json.loads(word[0]), word.end()
    except ValueError as error:
        raise _Malformed(str(error)) from None


def _items(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return the object or array that begins at `at`, and the offset behind it."""
    is_object = text[at] == "{"
    close, items, pairs = "}" if is_object else "]", [], {}
    at = _skip(text, at + 1)
    while not text.startswith(close, at):
        if is_object:
            key, at = _key(text, at)
            pairs[key], at = _value(text, at, depth + 1)
        else:
            item, at = _value(text, at, depth + 1)
            items.append(item)
        at = _skip(text, at)
        if text.startswith(",", at):
            at = _skip(text, at + 1)
        elif not text.startswith(close, at):
            raise _Malformed(f"no , or {close} at {text[at : at + 20]!r}")
    return pairs if is_object else items, at + 1


def _key(text: str, at: int) -> tuple[str, int]:
    if text.startswith(_QUOTE, at) or text.startswith('"', at):
        key, at = _value(text, at, _MAX_DEPTH)
        if isinstance(key, str) and text.startswith(":", at):
            return key, at + 1
    elif match := _KEY.match(text, at):
        return match[0].strip(), match.end() + 1
    raise _Malformed(f"no key at {text[at : at + 20]!r}")


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
