"""Split a transcript into segments: reasoning, code, tool responses and answer, each with its tokens."""

import bisect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, repeat, takewhile
from typing import Any

import numpy as np

from rstar_lab.runs.messages import read_messages
from rstar_lab.tool_calls import ToolCall, parse_stored_turn
from rstar_lab.untrusted.text import up_to_last, visible

_HEADER = re.compile(
    r"(?:<\|(?:end|call|return)\|>)?(?:<\|start\|>assistant)?<\|channel\|>[^<]*<\|message\|>"
)  # of gpt-oss
_SPECIAL = re.compile(r"<\|[a-z_]+\|>")
_OPEN = re.compile(r"<(reason|think|answer)>")
_USER = re.compile(r"<\|im_start\|>user\n(?!<tool_response>)(.*?)<\|im_end\|>", re.DOTALL)
_TOOL_RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
CHANNELS = ("entropy", "engine_log_probs", "trainer_log_probs", "loss_mask", "response_ids")


@dataclass(frozen=True)
class Segment:
    """A part of a transcript that is shown as one block.

    kind: system, user, reason, text, code, input, call (a tool call without code, or one that could not be parsed), tool, answer,
    environment, other; model or stream (tool and template tokens) in the raw view.
    first: index of the first response token. starts[i]: character offset in `text` where token `first + i` begins.
    """

    kind: str
    text: str
    turn: int
    tool: str | None = None
    outcome: str | None = None
    first: int = 0
    starts: tuple[int, ...] = ()
    malformed: bool = False  # of a call: it could not be parsed

    def payload(self) -> dict[str, Any]:
        """Return the segment for the browser, with offsets in UTF-16 code units as in JavaScript."""
        text = visible(self.text)
        starts: Sequence[int] = self.starts
        if starts and not text.isascii():
            units = [0, *accumulate(2 if ord(char) > 0xFFFF else 1 for char in text)]
            starts = [units[start] for start in starts]
        tool = None if self.tool is None else visible(self.tool)
        return vars(self) | {"text": text, "tool": tool, "starts": list(starts)}


class _TokenText:
    """The response as text, with the character offset where each token begins."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.text = "".join(texts)
        self.starts = [0, *accumulate(map(len, texts))][: len(texts)]

    def tokens(self, begin: int, end: int) -> tuple[int, tuple[int, ...]]:
        """Return the first token that overlaps [begin, end), and the offsets from `begin` of all tokens that do."""
        if begin >= end or not self.starts:
            return 0, ()
        first = bisect.bisect_right(self.starts, begin) - 1
        last = bisect.bisect_left(self.starts, end)
        return first, tuple(max(start - begin, 0) for start in self.starts[first:last])


def segments(record: Mapping[str, Any], *, raw: bool = False) -> list[Segment]:
    """Split a transcript into segments.

    record: columns of TRANSCRIPTS, and `token_texts` if the run stores tokens. With tokens, the text is exactly what the
    model wrote and read; a token that is not in the vocabulary of the run (text None) is shown as `<id 1234>`. Without
    tokens, it is the text of the messages. Tool responses that the model did not read, because the rollout ended, follow
    the last turn.
    raw: return the unchanged token stream, one segment per run of equal loss-mask values.
    """
    messages = read_messages(record.get("messages"))
    first = takewhile(lambda message: message.get("role") in ("system", "user"), messages)
    opening = [Segment(message["role"], message["content"], 0) for message in first]
    if not messages and record.get("question"):
        opening = [Segment("user", str(record["question"]), 0)]
    texts, mask = record.get("token_texts"), record.get("loss_mask")
    if texts is None or mask is None or len(texts) == 0 or len(texts) != len(mask):
        return opening + list(_from_messages(messages[len(opening) if messages else 0 :]))
    ids = record.get("response_ids")
    names = repeat("?") if ids is None or len(ids) != len(texts) else ids
    known = [f"<id {name}>" if text is None else text for text, name in zip(texts, names, strict=False)]
    stream = _TokenText(known)
    responses = iter([message for message in messages if message.get("role") == "tool"])
    failure = [Segment("environment", m["content"], 0) for m in messages if m.get("role") == "environment"]
    last = max((i for i, message in enumerate(messages) if message.get("role") == "assistant"), default=len(messages))
    unread = list(_run_of_tools(messages[last + 1 :]))
    written = [message["content"] for message in messages if message.get("role") == "assistant"]
    return (
        opening + list(_from_tokens(stream, [bool(flag) for flag in mask], responses, unread, written, raw)) + failure
    )


def _from_messages(messages: list[dict[str, Any]]) -> Iterator[Segment]:
    turn = 0
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            turn += 1
            following = [m.get("outcome") for m in _run_of_tools(messages[index + 1 :])]
            text = message["content"]
            yield from _model_turn(text, (0, len(text)), turn, None, iter(following))
        elif role == "tool":
            yield Segment("tool", message["content"], turn, message.get("tool"), message.get("outcome"))
        else:
            yield Segment(role, message["content"], turn)


def _run_of_tools(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return takewhile(lambda message: message.get("role") == "tool", messages)


def _from_tokens(
    stream: _TokenText,
    mask: list[bool],
    responses: Iterator[dict[str, Any]],
    unread: list[dict[str, Any]],
    written: list[str],
    raw: bool,
) -> Iterator[Segment]:
    """Yield the segments of a response with tokens.

    unread: tool messages after the last turn, which have no tokens if the rollout ended with that turn.
    written: text of each assistant message. A fork can start a turn with edited text, which the loss mask excludes; it
    is shown as part of the turn.
    """
    stretches: list[tuple[bool, int, int]] = []
    token = 0
    for flag, group in groupby(mask):
        count = sum(1 for _ in group)
        end = stream.starts[token + count] if token + count < len(mask) else len(stream.text)
        begin = stream.starts[token]
        if flag and stretches and not raw:
            turn = sum(before for before, *_ in stretches)
            _, low, _ = stretches[-1]
            begin -= _edited_length(stream.text[low:begin], written[turn] if turn < len(written) else "")
            stretches[-1] = (False, low, begin)
        stretches.append((flag, begin, end))
        token += count
    turn = 0
    for place, (flag, begin, end) in enumerate(stretches):
        turn += flag
        if raw:
            first, starts = stream.tokens(begin, end)
            yield Segment("model" if flag else "stream", stream.text[begin:end], turn, None, None, first, starts)
        elif flag:
            following = stretches[place + 1] if place + 1 < len(stretches) else None
            # Read the tool responses first: a tool call shows the outcome of its response.
            if following is None:
                answers = [Segment("tool", m["content"], turn, m.get("tool"), m.get("outcome")) for m in unread]
            else:
                answers = list(_tool_answers(stream, following[1:], turn, responses))
            outcomes = iter([answer.outcome for answer in answers])
            yield from _model_turn(stream.text, (begin, end), turn, stream, outcomes)
            yield from answers
        elif place == 0:
            yield from _tool_answers(stream, (begin, end), turn, responses)


def _edited_length(before: str, message: str) -> int:
    """Return the length of the longest end of `before`, the text between two turns, with which the turn's message starts."""
    start = max(before.rfind("<|im_start|>"), 0) if message else len(before)
    while (start := before.find(message[:1], start)) >= 0 and not message.startswith(before[start:]):
        start += 1
    return len(before) - start if start >= 0 else 0


def _tool_answers(
    stream: _TokenText, span: tuple[int, int], turn: int, responses: Iterator[dict[str, Any]]
) -> Iterator[Segment]:
    begin, end = span
    window = stream.text[begin:end]
    for match in _TOOL_RESPONSE.finditer(up_to_last(window, "</tool_response>")):
        message = next(responses, {})
        low, high = match.span(1)
        content = message.get("content", "")
        if content and window.startswith(content, low):
            high = low + len(content)
        first, starts = stream.tokens(begin + low, begin + high)
        yield Segment("tool", window[low:high], turn, message.get("tool"), message.get("outcome"), first, starts)
    if user_texts := _USER.findall(up_to_last(window, "<|im_end|>")):
        yield Segment("user", user_texts[-1], turn)  # message of the environment
    elif "<tool_response>" not in window and (text := _SPECIAL.sub("", window)).strip():
        message = next(responses, {})
        first, starts = stream.tokens(begin, end) if text == window else (0, ())
        yield Segment("tool", text, turn, message.get("tool"), message.get("outcome"), first, starts)


def _model_turn(
    text: str, span: tuple[int, int], turn: int, stream: _TokenText | None, outcomes: Iterator[str | None]
) -> Iterator[Segment]:
    """Split the model's text of one turn at its tags."""
    begin, end = span

    def piece(kind: str, low: int, high: int, **more: Any) -> Iterator[Segment]:
        while low < high and text[low] in "\n":
            low += 1
        while low < high and text[high - 1] in "\n ":
            high -= 1
        if low < high:
            first, starts = stream.tokens(low, high) if stream else (0, ())
            yield Segment(kind, text[low:high], turn, first=first, starts=starts, **more)

    def around(low: int, high: int) -> Iterator[Segment]:
        while low < high and (header := _HEADER.search(text, low, high)):
            yield from piece("text", low, header.start())
            low = header.end()
        while low < high and (tag := _OPEN.search(text, low, high)):
            yield from piece("text", low, tag.start())
            name = {"think": "reason"}.get(tag[1], tag[1])
            close = text.find(f"</{tag[1]}>", tag.end(), high)
            yield from piece(name, tag.end(), high if close < 0 else close)
            low = high if close < 0 else close + len(tag[1]) + 3
        yield from piece("text", low, high)

    def of_call(call: ToolCall, outcome: str | None) -> Iterator[Segment]:
        """Yield the code and the input of a call; if it has an error or no code, its text."""
        low, high = begin + call.start, begin + call.end
        if call.arguments is None or not isinstance(call.arguments.get("code"), str):
            low = text.index(call.raw, low, high)
            malformed = call.arguments is None
            yield from piece("call", low, low + len(call.raw), tool=call.name, outcome=outcome, malformed=malformed)
            return
        for kind in ("code", "input"):
            content = call.arguments.get(kind)
            if not isinstance(content, str) or (kind == "input" and not content):
                continue
            first, starts = 0, tuple[int, ...]()
            if stream and (places := _value_offsets(text, kind, content, low, high)):
                first, raw = stream.tokens(places[0], places[-1])
                starts = tuple(min(bisect.bisect_left(places, places[0] + start), len(content)) for start in raw)
            yield Segment(kind, content, turn, call.name, outcome if kind == "code" else None, first, starts)

    while special := _trailing_special(text, begin, end):
        end = special
    parsed = parse_stored_turn(text[begin:end])
    low, high = (begin + offset for offset in parsed.reasoning)
    yield from piece("reason", low, high)
    position = begin + parsed.reasoning_end if parsed.reasoning_end else high if high > low else begin
    for call in parsed.calls:
        yield from around(position, begin + call.start)
        yield from of_call(call, next(outcomes, None))
        position = begin + call.end
    yield from around(position, end)


def _trailing_special(text: str, begin: int, end: int) -> int | None:
    stripped = len(text[begin:end].rstrip()) + begin
    start = text.rfind("<|", begin, stripped)
    return start if start >= 0 and _SPECIAL.fullmatch(text, start, stripped) else None


_ESCAPE = re.compile(
    r'\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|[^"\\]', re.DOTALL
)


def _value_offsets(text: str, key: str, content: str, begin: int, end: int) -> Sequence[int]:
    """Return the offset in `text` of each character of the argument `content` of the call at [begin, end), then its end."""
    for opening in re.finditer(rf'"{key}"\s*:\s*"', text[begin:end]):  # a JSON string
        places, at = [], begin + opening.end()
        while at < end and (escape := _ESCAPE.match(text, at, end)):
            places.append(at)
            at = escape.end()
        if len(places) == len(content):
            return [*places, at]
    for opening in re.finditer(
        rf"<parameter={key}>\n?|<arg_key>{key}</arg_key>\s*<arg_value>|{key}:<\|\"\|>", text[begin:end]
    ):
        if text.startswith(content, begin + opening.end()):
            return range(begin + opening.end(), begin + opening.end() + len(content) + 1)
    return []


def token_values(record: Mapping[str, Any]) -> np.ndarray:
    """Return the values of CHANNELS per response token: float32 of shape (5, tokens), NaN where none is stored."""
    ids = record.get("response_ids")
    count = 0 if ids is None else len(ids)
    values = np.full((len(CHANNELS), count), np.nan, dtype=np.float32)
    for row, name in enumerate(CHANNELS):
        column = record.get(name)
        if column is not None and len(column) == count:
            values[row] = np.asarray([np.nan if value is None else value for value in column], dtype=np.float32)
    return values
