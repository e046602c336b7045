"""Find the tool calls of an assistant turn, in any supported syntax.

Every reader of calls uses this parser: rollouts, penalties, the inspector, the analysis and the importers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rstar_lab.common.errors import UserError
from rstar_lab.tool_calls.call import Schemas, ToolCall, gives_answer, looks_like_call, schemas_of, without_prose
from rstar_lab.tool_calls.function_tags import parse_function_tags
from rstar_lab.tool_calls.gemma4 import parse_gemma4
from rstar_lab.tool_calls.glm import parse_glm
from rstar_lab.tool_calls.harmony import parse_harmony, reasoning_of
from rstar_lab.tool_calls.hermes import parse_hermes
from rstar_lab.tool_calls.json_objects import parse_json_objects

Syntax = Literal["hermes", "function_tags", "json", "gemma4", "glm", "harmony"]
SYNTAXES: tuple[Syntax, ...] = get_args(Syntax)
Tools = Sequence[Mapping[str, Any]] | Mapping[str, Any]

_PARSERS: dict[Syntax, Callable[[str, Schemas, int], list[ToolCall]]] = {
    "hermes": parse_hermes,
    "function_tags": parse_function_tags,
    "json": parse_json_objects,
    "gemma4": parse_gemma4,
    "glm": parse_glm,
    "harmony": parse_harmony,
}
_MARKS: dict[Syntax, str] = {
    "hermes": "<tool_call>",
    "function_tags": "<function=",
    "json": '"name"',
    "gemma4": "<|tool_call>",
    "glm": "<arg_key>",
    "harmony": "<|message|>",
}
_TAGS = {"</think>": "<think>", "</reason>": "<reason>"}
_CHANNEL = {"<channel|>": "<|channel>thought"}  # of Gemma 4
_TAG = re.compile(r"\A(?:<tool_call>|<\|python_tag\|>|<\|tool_call>)|(?:</tool_call>|<tool_call\|>)\Z")


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """An assistant turn, split into reasoning, tool calls and the text around them.

    Attributes:
        text: The turn.
        syntax: Syntax of the calls.
        calls: Calls after the reasoning, those with an error included.
        drafts: Calls in the reasoning. They do not run.
        reasoning: Offsets of the reasoning, its tags excluded; (0, 0) if there is none.
        reasoning_end: Offset behind the tag that ends the reasoning; 0 if there is none.
    """

    text: str
    syntax: Syntax
    calls: list[ToolCall]
    drafts: list[ToolCall]
    reasoning: tuple[int, int]
    reasoning_end: int

    @property
    def outside(self) -> str:
        """The turn without its calls and drafts."""
        pieces, position = [], 0
        for call in (*self.drafts, *self.calls):
            pieces.append(self.text[position : call.start])
            position = call.end
        return "".join([*pieces, self.text[position:]])


def parse_tool_calls(text: str, *, syntax: Syntax = "hermes", tools: Tools | None = None) -> list[ToolCall]:
    """Return the tool calls of one assistant turn, in order.

    A call that cannot be parsed is returned with its error; no call is dropped. Calls in the reasoning are drafts and are
    left out: the reasoning ends at the first `</think>` or `</reason>` outside of the arguments of a call. Reasoning
    that never ends hides no call. Prose that only names a tag, in a turn that then gives its answer, is no call.

    Args:
        text: The turn, without the tokens that end it.
        syntax: How the model writes calls. `hermes`: JSON in `<tool_call>` tags; `function_tags`: `<function=NAME>` with
            `<parameter=KEY>` tags (Qwen3-Coder, Qwen3.5); `json`: JSON objects (Llama 3); `gemma4`; `glm`: `<arg_key>` and
            `<arg_value>` tags (GLM 4.5 and later); `harmony`: messages to functions (gpt-oss).
        tools: Function schemas of the tools, in OpenAI's form. `function_tags` and `glm` read the types of arguments from
            them.

    Returns:
        Calls with `name`, `arguments` and `error`. Either `arguments` or `error` is None.

    Raises:
        UserError: The syntax is unknown.
    """
    return parse_turn(text, syntax, tools).calls


def parse_turn(text: str, syntax: Syntax = "hermes", tools: Tools | None = None) -> ParsedTurn:
    """Return an assistant turn split at its reasoning and calls. Arguments and errors: as for `parse_tool_calls`."""
    if syntax not in _PARSERS:
        raise UserError(f"syntax {syntax!r} of tool calls is not supported; choose from {', '.join(SYNTAXES)}")
    schemas, parse = schemas_of(tools), _PARSERS[syntax]
    found = parse(text, schemas, 0)
    if syntax == "harmony":
        return ParsedTurn(text, syntax, found, [], *reasoning_of(text))
    opening, closing = _reasoning_tags(text, found, syntax)
    if closing is not None and _inside_truncated_call(text, found, closing) and not parse(text, schemas, closing.end()):
        closing = None
    if closing is None:
        return ParsedTurn(text, syntax, without_prose(found, text), [], _open_reasoning(text, opening, found), 0)
    begin = opening.start() if opening else 0
    if syntax != "json" and all(call.start >= closing.end() for call in found):
        calls = found  # nothing in the reasoning looks like a call, so parsing behind it gives the same
    else:
        calls = [call for call in found if call.end <= begin] + parse(text, schemas, closing.end())
    drafts = [call for call in found if begin <= call.start and call.end <= closing.start()]
    reasoning = (opening.end() if opening else 0, closing.start())
    return ParsedTurn(text, syntax, without_prose(calls, text), drafts, reasoning, closing.end())


def _reasoning_tags(
    text: str, calls: Sequence[ToolCall], syntax: Syntax
) -> tuple[re.Match[str] | None, re.Match[str] | None]:
    """Return the tags outside of the calls that open and close the reasoning. Its opening tag may be part of the prompt."""
    tags = _CHANNEL if syntax == "gemma4" else _TAGS
    spans = iter([(call.start, call.end) for call in calls if call.closed])
    begin, end = next(spans, (0, 0))
    opening: re.Match[str] | None = None
    for match in re.finditer("|".join(map(re.escape, (*tags, *tags.values()))), text):
        while end <= match.start() and (following := next(spans, None)):
            begin, end = following
        if begin < match.start() < end:
            continue
        if match[0] not in tags:
            opening = opening or match
        elif opening is None or tags[match[0]] == opening[0]:
            return opening, match
    return opening, None


def _inside_truncated_call(text: str, calls: Sequence[ToolCall], closing: re.Match[str]) -> bool:
    """Return whether a tag belongs to the arguments of a call that the end of the text cuts off, not to the reasoning."""
    last = calls[-1] if calls else None
    return (
        last is not None
        and (last.error is not None and not last.closed)
        and last.start < closing.start()
        and last.end == len(text)
        and looks_like_call(last.raw)
        and not gives_answer(text[closing.end() :])
    )


def _open_reasoning(text: str, opening: re.Match[str] | None, calls: Sequence[ToolCall]) -> tuple[int, int]:
    """Return the offsets of reasoning that never ends: up to the first call, the answer or the end."""
    if opening is None or text[: opening.start()].strip():
        return (0, 0)
    answer = text.find("<answer>", opening.end())
    ends = [len(text), *(call.start for call in calls), *([answer] if answer >= 0 else [])]
    return opening.end(), min(ends)


def text_outside_calls(text: str, syntax: Syntax = "hermes") -> str:
    """Return what an assistant turn contains besides its calls, those in the reasoning included.

    A well-formed call is left out with its tags. Of a malformed call, only the tags are left out; a call that another
    opening tag interrupts keeps its tag.
    """
    parse = _PARSERS[syntax]
    drafts = parse(text, {}, 0)
    closing = None if syntax == "harmony" else _reasoning_tags(text, drafts, syntax)[1]
    end = closing.end() if closing else 0
    pieces, position = [], 0
    for call in (*(draft for draft in drafts if draft.end <= end), *parse(text, {}, end)):
        pieces.append(text[position : call.start])
        if call.error:
            raw = text[call.start : call.end]
            pieces.append(_TAG.sub("", raw) if call.closed or call.end == len(text) else raw)
        position = call.end
    return "".join([*pieces, text[position:]])


def find_syntax(rendered: str, name: str, arguments: Mapping[str, Any]) -> Syntax | None:
    """Return the syntax of the one call in a rendered turn, or None if no parser reads it back."""
    for syntax, parse in _PARSERS.items():
        calls = parse(rendered, {}, 0)
        if [(call.name, call.arguments) for call in calls] == [(name, arguments)]:
            return syntax
    return None


def parse_stored_turn(text: str) -> ParsedTurn:
    """Return a stored turn whose syntax is not known, in the first syntax that finds a well-formed call; else in the first
    that finds a malformed one."""
    first: ParsedTurn | None = None
    for syntax, mark in _MARKS.items():
        if mark in text:
            turn = parse_turn(text, syntax)
            if any(call.error is None for call in turn.calls):
                return turn
            if turn.calls and (first is None or "<function=" in turn.calls[0].raw):
                first = turn
    return first or parse_turn(text)


def parse_stored_calls(text: str) -> list[ToolCall]:
    """Return the calls of a stored turn whose syntax is not known."""
    return parse_stored_turn(text).calls
