"""The events of a chat. `Sections` splits the text of the model into reasoning, calls and answers while it streams."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rstar_lab.tool_calls import ToolCall, parse_tool_calls


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


# The kind of the text after each tag. Other models use `think` for their reasoning.
_OPENS = {
    "<reason>": Kind.REASON, "<think>": Kind.REASON, "</reason>": Kind.TEXT, "</think>": Kind.TEXT,
    "<answer>": Kind.ANSWER, "</answer>": Kind.TEXT, "<tool_call>": Kind.CALL, "</tool_call>": Kind.TEXT,
}  # fmt: skip
_TAG = re.compile("|".join(map(re.escape, _OPENS)))
_CALL_END = re.compile(re.escape("</tool_call>"))
_LONGEST = max(map(len, _OPENS))


class Sections:
    """Splits one turn, received in pieces of any size, into events without the tags.

    kind: kind of the text before the first tag. parse: returns the calls in a text with `<tool_call>` tags.
    """

    def __init__(self, kind: Kind = Kind.REASON, parse: Callable[[str], list[ToolCall]] = parse_tool_calls):
        self.kind, self._parse, self._buffer = kind, parse, ""

    def feed(self, text: str) -> list[Event]:
        """Add a piece; return the new events. Text that may be the start of a tag stays in the buffer."""
        self._buffer += text
        events = []
        while match := (_CALL_END if self.kind is Kind.CALL else _TAG).search(self._buffer):
            events += self._event(self._buffer[: match.start()])
            self._buffer = self._buffer[match.end() :]
            self.kind = _OPENS[match[0]]
        if self.kind is not Kind.CALL:
            keep = _start_of_tag(self._buffer)
            events += self._event(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
        return events

    def end(self) -> list[Event]:
        """Return the events of the remaining buffer."""
        events = self._event(self._buffer)
        self._buffer = ""
        return events

    def _event(self, text: str) -> list[Event]:
        if self.kind is Kind.CALL:
            return [call_event(call) for call in self._parse(f"<tool_call>{text}</tool_call>")[:1]]
        return [Event(self.kind, text)] if text else []


def _start_of_tag(text: str) -> int:
    """Return how many characters at the end of `text` may be the start of a tag."""
    start = text.rfind("<", max(0, len(text) - _LONGEST))
    return len(text) - start if start >= 0 and any(tag.startswith(text[start:]) for tag in _OPENS) else 0


def call_event(call: ToolCall) -> Event:
    """Return the event of a call: its code, or its raw text if it could not be parsed."""
    return Event(Kind.CALL, _code(call.arguments) if call.arguments is not None else call.raw.strip(), call.name or "")


def _code(arguments: dict[str, Any]) -> str:
    code, others = arguments.get("code"), {name: value for name, value in arguments.items() if name != "code"}
    if not isinstance(code, str):
        return json.dumps(arguments, ensure_ascii=False, indent=1)
    if stdin := others.pop("input", ""):
        code += "".join(f"\n# {line}" for line in ("standard input:", *str(stdin).splitlines()))
    return code + (f"\n# {json.dumps(others, ensure_ascii=False)}" if others else "")
