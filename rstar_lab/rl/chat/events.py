"""What happens in a chat, piece by piece: the text of a model cut into thinking, calls and answers while it streams."""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rstar_lab.rl.chat_format.parser import ToolCall, parse_tool_calls


class Kind(StrEnum):
    REASON = "reason"  # thinking; comes in pieces
    TEXT = "text"  # neither thinking nor answer; comes in pieces
    ANSWER = "answer"  # comes in pieces
    CALL = "call"  # the code of a tool call, or its arguments where it has none; whole
    RESULT = "result"  # what the tool answered; whole
    STOP = "stop"  # the end of a reply; the text says why


@dataclass(frozen=True, slots=True)
class Event:
    kind: Kind
    text: str
    tool: str = ""
    outcome: str = ""


# What a tag opens. Other models' thinking is told by `think`.
_OPENS = {
    "<reason>": Kind.REASON, "<think>": Kind.REASON, "</reason>": Kind.TEXT, "</think>": Kind.TEXT,
    "<answer>": Kind.ANSWER, "</answer>": Kind.TEXT, "<tool_call>": Kind.CALL, "</tool_call>": Kind.TEXT,
}  # fmt: skip
_TAG = re.compile("|".join(map(re.escape, _OPENS)))
_CALL_END = re.compile(re.escape("</tool_call>"))
_LONGEST = max(map(len, _OPENS))


class Sections:
    """Cuts one turn, fed in pieces of any size; tags are left out. kind: of what comes before the first tag."""

    def __init__(self, kind: Kind = Kind.REASON):
        self.kind, self._held = kind, ""

    def feed(self, text: str) -> list[Event]:
        """What is certain after this piece; the start of what may be a tag is kept back."""
        self._held += text
        events = []
        while match := (_CALL_END if self.kind is Kind.CALL else _TAG).search(self._held):
            events += self._event(self._held[: match.start()])
            self._held = self._held[match.end() :]
            self.kind = _OPENS[match[0]]
        if self.kind is not Kind.CALL:
            keep = _start_of_tag(self._held)
            events += self._event(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        return events

    def end(self) -> list[Event]:
        """What was kept back."""
        events = self._event(self._held)
        self._held = ""
        return events

    def _event(self, text: str) -> list[Event]:
        if self.kind is Kind.CALL:
            return [call_event(call) for call in parse_tool_calls(f"<tool_call>{text}</tool_call>")[:1]]
        return [Event(self.kind, text)] if text else []


def _start_of_tag(text: str) -> int:
    """How many characters at the end of `text` may be the beginning of a tag."""
    start = text.rfind("<", max(0, len(text) - _LONGEST))
    return len(text) - start if start >= 0 and any(tag.startswith(text[start:]) for tag in _OPENS) else 0


def call_event(call: ToolCall) -> Event:
    return Event(Kind.CALL, _code(call.arguments) if call.arguments is not None else call.raw.strip(), call.name or "")


def _code(arguments: dict[str, Any]) -> str:
    code, others = arguments.get("code"), {name: value for name, value in arguments.items() if name != "code"}
    if not isinstance(code, str):
        return json.dumps(arguments, ensure_ascii=False, indent=1)
    if given := others.pop("input", ""):
        code += "".join(f"\n# {line}" for line in ("standard input:", *str(given).splitlines()))
    return code + (f"\n# {json.dumps(others, ensure_ascii=False)}" if others else "")
