"""The events of a chat. `Sections` splits the text of the model into reasoning, calls and answers while it streams."""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rstar_lab.tool_calls import Syntax, ToolCall, parse_tool_calls
from rstar_lab.tool_calls.harmony import messages


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
    "<answer>": Kind.ANSWER, "</answer>": Kind.TEXT, "<|channel>thought": Kind.REASON, "<channel|>": Kind.TEXT,
}  # fmt: skip
_TAG = re.compile("|".join(map(re.escape, _OPENS)))
# What may start a call; the turns of gpt-oss are shown when they are complete.
_CALL_TAG: dict[Syntax, str] = {
    "hermes": "<tool_call>",
    "function_tags": r"<tool_call>|^[ \t]*<function=",
    "json": r"\A\s*(?:\{|<\|python_tag\|>)",
    "gemma4": r"<\|tool_call>",
    "glm": "<tool_call>",
    "harmony": r"\A",
}
_CALL_END = ("</tool_call>", "<tool_call|>")
_MOST_TRIES = 100  # to parse an unfinished turn; further calls are shown at its end
_LONGEST = max(map(len, (*_OPENS, *_CALL_END)))


class Sections:
    """Splits one turn, received in pieces of any size, into events without the tags.

    The text from the start of a call on is kept until the call is complete, or until the turn ends. Only then is it
    known whether a tag in it belongs to an argument, opens a malformed call or is prose. In the reasoning, the tags of
    calls are text; if the reasoning never ends, its calls follow as events.

    Args:
        kind: Kind of the text before the first tag.
        syntax: How the model writes calls.
    """

    def __init__(self, kind: Kind = Kind.REASON, syntax: Syntax = "hermes"):
        self.kind, self.syntax = kind, syntax
        self._call = re.compile(_CALL_TAG[syntax], re.MULTILINE)
        self._text, self._at, self._in_call, self._tries = "", 0, False, 0
        self._never_ended = kind is Kind.REASON  # whether the whole turn so far is reasoning

    def feed(self, text: str) -> list[Event]:
        """Add a piece; return the new events. Text that may be the start of a tag is kept."""
        self._text += text
        events: list[Event] = []
        while True:
            if self.syntax == "harmony":
                return events
            if self._in_call:
                arrived = self._text[max(self._at, len(self._text) - len(text) - _LONGEST) :]
                complete = self._complete_call() if any(tag in arrived for tag in _CALL_END) else None
                if complete is None:
                    return events
                events.append(complete)
                continue
            call = None if self.kind is Kind.REASON else self._call.search(self._text, self._at)
            tag = _TAG.search(self._text, self._at, call.start() if call else len(self._text))
            if tag:
                events += self._until(tag.start())
                self._at, self.kind = tag.end(), _OPENS[tag[0]]
                self._never_ended &= _OPENS[tag[0]] is Kind.REASON
            elif call:
                events += self._until(call.start())
                self._in_call = True
            else:
                return events + self._until(len(self._text) - _start_of_tag(self._text[self._at :]))

    def end(self) -> list[Event]:
        """Return the events of the text that was kept."""
        if self.syntax == "harmony":
            return self._messages()
        events: list[Event] = []
        for call in self._calls(self._at) if self._in_call else ():
            events += [*self._plain(call.start), call_event(call)]
            self._at = call.end
        events += self._plain(len(self._text))
        if self._never_ended:
            events += [call_event(call) for call in self._calls(0)]
        return events

    def _messages(self) -> list[Event]:
        """Return the events of a turn of gpt-oss."""
        calls = {call.start: call for call in self._calls(0)}
        events = []
        for message in messages(self._text):
            if message.start in calls:
                events.append(call_event(calls[message.start]))
            elif text := self._text[message.body : message.body_end]:
                events.append(Event(Kind.REASON if "analysis" in message.header else Kind.TEXT, text))
        return events

    def _calls(self, begin: int) -> list[ToolCall]:
        """Return the calls of the turn that start at `begin` or later."""
        return [call for call in parse_tool_calls(self._text, syntax=self.syntax) if call.start >= begin]

    def _complete_call(self) -> Event | None:
        """Return the event of the call at the current place, if it is complete."""
        self._tries += 1
        # In GLM's syntax a value may lack its end, so a prefix looks complete.
        call = None if self.syntax == "glm" or self._tries > _MOST_TRIES else next(iter(self._calls(self._at)), None)
        if call is None or call.error:
            return None
        self._at, self._in_call, self.kind = call.end, False, Kind.TEXT
        return call_event(call)

    def _plain(self, end: int) -> list[Event]:
        """Return the events of the text without calls up to `end`."""
        events: list[Event] = []
        while tag := _TAG.search(self._text, self._at, end):
            events += self._until(tag.start())
            self._at, self.kind = tag.end(), _OPENS[tag[0]]
        return events + self._until(end)

    def _until(self, end: int) -> list[Event]:
        text, self._at = self._text[self._at : end], max(self._at, end)
        return [Event(self.kind, text)] if text else []


def _start_of_tag(text: str) -> int:
    """Return how many characters at the end of `text` may be the start of a tag."""
    start = text.rfind("<", max(0, len(text) - _LONGEST))
    tags = (*_OPENS, "<tool_call>", "<|tool_call>", "<function=")
    return len(text) - start if start >= 0 and any(tag.startswith(text[start:]) for tag in tags) else 0


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
