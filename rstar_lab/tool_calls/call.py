"""One tool call of an assistant turn, and the values of arguments that a model writes as plain text."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]  # parameters (JSON schema of the arguments), by the name of the tool

_ANSWER = re.compile(r"</answer>|\\boxed\s*\{")
_ATTEMPT = re.compile(r"\s*(?:\{(?!\s*(?:\.\.|…|\}))|\[|<function=\W?\w|call:\w|[\w.-]+\s*<arg_key>)")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a turn. Either `arguments` or `error` is None.

    Attributes:
        name: Name of the tool; None if it cannot be read.
        arguments: The arguments, by name.
        error: Why the call cannot be parsed, as a sentence for the model.
        raw: Text of the call without its outer tags.
        start: Offset of the call in the text of the turn, its tags included.
        end: Offset behind the call, its tags included.
        closed: Whether the call has its closing tag.
    """

    name: str | None
    arguments: dict[str, Any] | None
    error: str | None
    raw: str
    start: int = field(default=0, compare=False)
    end: int = field(default=0, compare=False)
    closed: bool = field(default=True, compare=False)


class Tags:
    """The tags around the calls of a syntax."""

    def __init__(self, opening: str, closing: str):
        self.opening, self.closing = opening, closing
        self._pattern = re.compile(f"{re.escape(opening)}|{re.escape(closing)}")

    def find_calls(self, text: str, start: int, read: Callable[[int], ToolCall]) -> list[ToolCall]:
        """Return the calls that begin with an opening tag, from `start` on. read: returns the call that begins at an offset."""
        calls: list[ToolCall] = []
        position = text.find(self.opening, start)
        while position >= 0:
            calls.append(read(position))
            position = text.find(self.opening, calls[-1].end)
        return calls

    def behind_next(self, text: str, position: int) -> int:
        """Return the offset behind the next closing tag, or of the next opening tag if that comes first."""
        match = self._pattern.search(text, position)
        return len(text) if match is None else match.end() if match[0] == self.closing else match.start()

    def malformed(self, text: str, start: int, end: int, name: str | None, error: str) -> ToolCall:
        """Return the call at these offsets, tags included, with an error."""
        raw = text[start:end].removeprefix(self.opening)
        return ToolCall(name, None, error, raw.removesuffix(self.closing), start, end, raw.endswith(self.closing))


TAGS = Tags("<tool_call>", "</tool_call>")


def decode_json(raw: str, subject: str = "The tool call is") -> tuple[Any, str | None]:
    """Return (JSON value, None) or (None, error message). subject: what is decoded, for the message."""
    try:
        return json.loads(raw, parse_constant=reject_constant), None
    except RecursionError:
        return None, "The tool call is nested too deeply."
    except ValueError as error:
        return None, f"{subject} not valid JSON: {error}"


def gives_answer(text: str) -> bool:
    return _ANSWER.search(text) is not None


def looks_like_call(raw: str) -> bool:
    """Return whether a text begins as a call does, in any syntax."""
    return _ATTEMPT.match(raw) is not None


def without_prose(calls: Sequence[ToolCall], text: str) -> list[ToolCall]:
    """Return the calls without mentions of an opening tag in prose: what does not begin as a call, and is malformed, in a
    turn that gives its final answer after it."""
    if all(call.error is None for call in calls):
        return list(calls)
    answer = max((match.start() for match in _ANSWER.finditer(text)), default=-1)
    return [call for call in calls if not call.error or answer < call.start or looks_like_call(call.raw)]


def schemas_of(tools: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None) -> Schemas:
    """Return the JSON schemas of the arguments, by the name of the tool.

    Args:
        tools: Function schemas in OpenAI's form (`{"type": "function", "function": {...}}`), the inner objects alone, or
            a mapping of names to either of them or to the JSON schema of the arguments.
    """
    if tools is None:
        return {}
    named: dict[str, Mapping[str, Any]] = {}
    items = tools.items() if isinstance(tools, Mapping) else ((None, tool) for tool in tools)
    for key, tool in items:
        function = tool.get("function", tool)
        name = key if key is not None else function.get("name")
        if isinstance(name, str):
            named[name] = function.get("parameters", function if "properties" in function else {}) or {}
    return named


class ReadAhead:
    """Limits how far the parser of one turn reads ahead for the ends of values.

    A format that escapes nothing requires reading ahead. Without a limit, each value of a hostile turn is searched to the end of the
    turn, which takes a time that is quadratic in its length.
    """

    def __init__(self, text: str):
        self.text, self.left = text, 10 * len(text) + 2_000_000

    def matches(self, pattern: re.Pattern[str], start: int) -> Iterator[re.Match[str]]:
        """Yield the matches from `start` on, until the limit is reached."""
        for match in pattern.finditer(self.text, start):
            self.left -= match.end() - start
            start = match.end()
            if self.left < 0:
                return
            yield match
        self.left -= len(self.text) - start


WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_TEXT_ARGUMENTS = ("code", "input")  # of the code tools: always text, even without a schema
_LONGEST_LITERAL = 100_000
_NUMBER = re.compile(r"[+-]?(?=\.?\d)\d{0,18}(\.\d{0,18})?", re.ASCII)  # that are not JSON: `07`, `+5`, `.5`, `2.`


def read_value(text: str, tool: str, key: str, schemas: Schemas) -> Any:
    """Return the value that the text of an argument means.

    A string stays as it is. A value of another type is read as JSON, else as a Python literal (`True`, `None`, `['a']`); if
    it is neither, it stays text, and the check of the arguments reports it. An argument without a schema is read the same
    way, except that those of the code tools are text.
    """
    properties = schemas.get(tool, {}).get("properties") or {}
    if key not in properties:
        return text if key in _TEXT_ARGUMENTS else _literal(text)
    types = _types(properties[key])
    if not types or "string" in types:
        return None if "null" in types and text.strip() in ("null", "None") else text
    value = _literal(text)
    if isinstance(value, str) and types & {"integer", "number"} and (number := _NUMBER.fullmatch(text.strip())):
        return float(text) if number[1] else int(text)
    return WORDS.get(text.strip().capitalize(), value) if isinstance(value, str) and "boolean" in types else value


def _types(schema: Any) -> set[str]:
    """Return the types that a schema allows, those of its alternatives included."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    types = {kind} if isinstance(kind, str) else set(kind or ())
    for name in ("anyOf", "oneOf", "allOf"):
        for alternative in schema.get(name) or ():
            types |= _types(alternative)
    return types


def _literal(text: str) -> Any:
    stripped = text.strip()
    if stripped in WORDS:
        return WORDS[stripped]
    try:
        value = json.loads(stripped, parse_constant=reject_constant)
        return text if isinstance(value, str) else value
    except (ValueError, RecursionError):
        pass
    if stripped[:1] not in ("[", "{") or len(stripped) > _LONGEST_LITERAL:
        return text
    try:
        value = ast.literal_eval(stripped)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return value if _is_json(value) else text


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float)


def reject_constant(constant: str) -> None:
    """Refuse NaN and Infinity, which are not JSON."""
    raise ValueError(f"{constant} is not JSON")
