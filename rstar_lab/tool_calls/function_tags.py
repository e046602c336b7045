"""Tool calls in the tags of Qwen3-Coder, Qwen3.5 and later, and Nemotron:
`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`.

The format escapes nothing, so a value may contain any of its tags. A tag ends a value only where the format goes on after
it: `</parameter>` before the next tag, on a line of its own if the value began on one. A complete call inside a value
belongs to the value.
"""

import re
from dataclasses import replace
from typing import Any

from rstar_lab.tool_calls.call import TAGS, ReadAhead, Schemas, ToolCall, read_value

_BARE = re.compile(
    r"(?P<line>^[ \t]*)(?=<function=[^>\n]{1,256}>\s*(?:<parameter=|</function>))"
    r"|(?=<function=[^>\n]{1,256}>\s*<parameter=)|<tool_call>",
    re.MULTILINE,
)
_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,256})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,256})>(\n?)")
_TOKEN = re.compile(
    r"(?P<call><function=[^>\n]{1,256}>\s*(?=<parameter=|</function>))|(?P<end></function>)|(?P<close></parameter>)"
    r"|(?P<next>(?<=\n)<parameter=(?P<key>[^>\n]{1,256})>)"
)
_GOES_ON = re.compile(r"</parameter>\s*(?:<parameter=[^>\n]{1,256}>|</function>|</tool_call>|\Z)")
_CALL_ENDS = re.compile(r"</function>\s*(?:</tool_call>|<tool_call>|<function=|\Z)")
_MAX_NESTING = 8  # calls inside a value
_NOT_CLOSED = "The tool call has no closing </parameter>, </function> or </tool_call>."


def parse_function_tags(text: str, schemas: Schemas, start: int = 0) -> list[ToolCall]:
    """Return all calls of a turn from `start`, in order. A call that cannot be parsed is returned with its error.

    A call without the opening `<tool_call>` counts if its `<function=NAME>` begins a line, or if it is well formed. Several
    functions in one `<tool_call>` are several calls. A value without `</parameter>` ends at the line of the next parameter
    that the tool has, or at the end of the function; a program (`code`) has to be closed before the next parameter, because
    half a program must not run. Values of other types than string are read by the schema (`values.read_value`).
    """
    calls: list[ToolCall] = []
    ahead = ReadAhead(text)
    position = start
    while match := _BARE.search(text, position):
        tagged = match[0] == TAGS.opening
        begin = match.start() if tagged else match.end()
        in_line = not tagged and match["line"] is None
        position = begin + len("<function=")
        if in_line and ahead.left < 0:
            continue
        found, end = _block(ahead, begin, tagged, schemas)
        if in_line and found[0].error:  # prose that quotes the tags
            ahead.left -= end - begin
            continue
        position = end
        calls += found
    return calls


def _block(ahead: ReadAhead, start: int, tagged: bool, schemas: Schemas) -> tuple[list[ToolCall], int]:
    """Return the calls that begin at `start`, and the offset behind them."""
    text, calls = ahead.text, list[ToolCall]()
    begin, position = start, start + len(TAGS.opening) * tagged
    while function := _FUNCTION.match(text, position):
        name = function[1].strip(" \"'")
        arguments, behind, error = _arguments(ahead, function.end(), name, schemas)
        if arguments is None:
            return [*calls, TAGS.malformed(text, begin, behind, name, error)], behind
        calls.append(ToolCall(name, arguments, None, text[position:behind], begin, behind))
        begin = position = behind
    if not calls:
        behind = TAGS.behind_next(text, position)
        return [TAGS.malformed(text, start, behind, None, "The tool call has no <function=NAME>.")], behind
    closing = re.compile(r"\s*</tool_call>").match(text, position)
    if closing:
        calls[-1] = replace(calls[-1], end=closing.end())
    elif tagged:
        behind = TAGS.behind_next(text, position)
        calls[-1] = TAGS.malformed(text, calls[-1].start, behind, calls[-1].name, _NOT_CLOSED)
    return calls, max(calls[-1].end, position)


def _arguments(ahead: ReadAhead, position: int, name: str, schemas: Schemas) -> tuple[dict[str, Any] | None, int, str]:
    """Return (arguments, offset behind `</function>`, ""), or (None, end of the malformed call, error)."""
    text, arguments = ahead.text, dict[str, Any]()
    while parameter := _PARAMETER.match(text, position):
        key = parameter[1].strip(" \"'")
        end, position = _value_end(ahead, parameter.end(), bool(parameter[2]), key, name, schemas)
        if end is None:
            return None, position, _NOT_CLOSED
        if key in arguments:  # a value that contains the tag, or two programs
            return None, TAGS.behind_next(text, position), f"The tool call has the parameter {key} twice."
        value = text[parameter.end() : end]
        arguments[key] = read_value(value.removesuffix("\n"), name, key, schemas)
    closing = re.compile(r"\s*</function>").match(text, position)
    return (arguments, closing.end(), "") if closing else (None, TAGS.behind_next(text, position), _NOT_CLOSED)


def _value_end(
    ahead: ReadAhead, start: int, on_line: bool, key: str, name: str, schemas: Schemas
) -> tuple[int | None, int]:
    """Return (end of the value, where the next tag of the call begins), or (None, end of the malformed call)."""
    text, declared = ahead.text, schemas.get(name, {}).get("properties") or {}
    inline: tuple[int, int] | None = None  # the first closing tag within a line
    unclosed: int | None = None  # `</function>` without `</parameter>`
    depth, first_call = 0, len(text)
    for token in ahead.matches(_TOKEN, start):
        place = token.start()
        starts_line = text.startswith("\n", place - 1)
        if token["call"]:
            if unclosed is not None or depth == _MAX_NESTING:
                break
            first_call = first_call if depth else place
            depth += 1
        elif token["end"]:
            if depth:
                depth -= 1
            elif unclosed is None and starts_line and _CALL_ENDS.match(text, place):
                unclosed = place
        elif depth:
            continue
        elif token["next"]:
            if inline is None and unclosed is None:
                return (
                    (place, place)
                    if key != "code" and token["key"] in declared
                    else (None, TAGS.behind_next(text, place))
                )
        elif _GOES_ON.match(text, place):
            if starts_line or not on_line:
                return place, token.end()
            inline = inline or (place, token.end())
    if inline is not None:
        return inline
    if unclosed is not None:
        return unclosed, unclosed
    if depth:  # the next call begins before this one ends
        opening = text.rfind(TAGS.opening, start, first_call)
        return None, opening if opening >= 0 and not text[
            opening + len(TAGS.opening) : first_call
        ].strip() else first_call
    return None, TAGS.behind_next(text, start)
