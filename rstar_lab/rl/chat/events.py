"""The events of a chat. `TurnSplitter` splits the text of the model into reasoning, calls and answers while it streams."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rstar_lab.tool_calls import Syntax, ToolCall


class Kind(StrEnum):
    """The kind of an event. REASON, TEXT and ANSWER arrive in pieces, CALL and RESULT complete."""

    REASON = "reason"
    TEXT = "text"  # neither reasoning nor answer
    ANSWER = "answer"
    CALL = "call"  # the code of a tool call, or its arguments if it has no code
    RESULT = "result"  # the response of the tool
    STOP = "stop"  # the end of a reply; the text is the stop reason


@dataclass(frozen=True, slots=True)
class Event:
    """One event. tool: name of the tool of a CALL or RESULT. outcome: of a RESULT."""

    kind: Kind
    text: str
    tool: str = ""
    outcome: str = ""


# The kind of the text after each tag, for the tags of all models.
_OPENS = {
    "<reason>": Kind.REASON, "<think>": Kind.REASON, "</reason>": Kind.TEXT, "</think>": Kind.TEXT,
    "<answer>": Kind.ANSWER, "</answer>": Kind.TEXT, "<|channel>thought": Kind.REASON, "<channel|>": Kind.TEXT,
    "<|channel|>analysis<|message|>": Kind.REASON, "<|channel|>final<|message|>": Kind.TEXT, "<|end|>": Kind.TEXT,
    "<|start|>assistant<|channel|>analysis<|message|>": Kind.REASON, "<|start|>assistant<|channel|>final<|message|>": Kind.TEXT,
}  # fmt: skip
_TAG = re.compile("|".join(map(re.escape, _OPENS)))
# What may start a call. The text from there on is shown when the turn is complete, and the agent loop has parsed it.
_CALL_TAG: dict[Syntax, str] = {
    "hermes": "<tool_call>",
    "function_tags": r"<tool_call>|^[ \t]*<function=",
    "json": r"\A\s*(?:\{|<\|python_tag\|>)",
    "gemma4": r"<\|tool_call>",
    "glm": "<tool_call>",
    "harmony": r"<\|start\|>assistant to=|<\|channel\|>commentary",
}
_LONGEST = max(map(len, _OPENS))


class TurnSplitter:
    """Splits one turn, received in pieces of any size, into events without the tags.

    Args:
        kind: Kind of the text before the first tag.
        syntax: How the model writes calls.
    """

    def __init__(self, kind: Kind = Kind.REASON, syntax: Syntax = "hermes"):
        self.kind = kind
        self._call = re.compile(_CALL_TAG[syntax], re.MULTILINE)
        self._text, self._at, self._in_call = "", 0, False

    def feed(self, text: str) -> list[Event]:
        """Add a piece; return the new events. Text that may be the start of a tag or belong to a call is kept."""
        self._text += text
        events: list[Event] = []
        while not self._in_call:
            call = None if self.kind is Kind.REASON else self._call.search(self._text, self._at)
            tag = _TAG.search(self._text, self._at, call.start() if call else len(self._text))
            if tag is None:
                self._in_call = call is not None
                end = call.start() if call else len(self._text) - _start_of_tag(self._text[self._at :])
                return events + self._until(end)
            events += [*self._until(tag.start())]
            self._at, self.kind = tag.end(), _OPENS[tag[0]]
        return events

    def end(self, calls: Iterable[ToolCall]) -> list[Event]:
        """Return the events of the text that was kept. calls: all calls of the turn, as the agent loop has parsed them."""
        events: list[Event] = []
        for call in calls:
            shown = call.raw.strip() if call.arguments is None else _code(call.arguments)
            events += [*self._plain(call.start), Event(Kind.CALL, shown, call.name or "")]
            if call.end > self._at:
                self._at, self.kind = call.end, Kind.TEXT
        return events + self._plain(len(self._text))

    def _plain(self, end: int) -> list[Event]:
        """Return the events of the text without calls up to `end`."""
        events: list[Event] = []
        while tag := _TAG.search(self._text, self._at, max(end, self._at)):
            events += self._until(tag.start())
            self._at, self.kind = tag.end(), _OPENS[tag[0]]
        return events + self._until(end)

    def _until(self, end: int) -> list[Event]:
        text, self._at = self._text[self._at : end], max(self._at, end)
        return [Event(self.kind, text)] if text else []


def _start_of_tag(text: str) -> int:
    """Return how many characters at the end of `text` may be the start of a tag."""
    tags = (*_OPENS, "<tool_call>", "<|tool_call>", "<function=", "<|start|>assistant to=")
    for length in range(min(_LONGEST, len(text)), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0


def _code(arguments: dict[str, Any]) -> str:
    """Return the code of a call, with its other arguments as a comment; without code, the arguments."""
    code, others = arguments.get("code"), {name: value for name, value in arguments.items() if value and name != "code"}
    if not isinstance(code, str):
        return json.dumps(arguments, ensure_ascii=False, indent=1)
    return code + (f"\n# {json.dumps(others, ensure_ascii=False)}" if others else "")
