"""One tool call of an assistant turn."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]  # parameters (JSON schema of the arguments), by the name of the tool

_ANSWER = re.compile(r"</answer>|\\boxed\s*\{")
_ATTEMPT = re.compile(r"\s*(?:\{(?!\s*(?:\.\.|…|\}))|\[|<function=|call:\w|[\w.-]+\s*<arg_key>)")


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
