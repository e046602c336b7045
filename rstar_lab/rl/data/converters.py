"""Convert public conversation data sets to our format. Each converter takes a row and returns (messages, tools).

For a row that it cannot convert, a converter raises ValueError with the reason; `convert` counts the reasons. The data sets
are those of rStar2-Agent, section 4.1: function calls, code as JSON, instruction following, chat.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from rstar_lab.rl.data.lint import lint
from rstar_lab.rl.renderers.conversations import Conversation, Message, reply, tool_calls
from rstar_lab.untrusted.files import DataError, parse_value
from rstar_lab.untrusted.text import counted

Messages = list[Message]
Tools = list[dict[str, Any]]
Converter = Callable[[Mapping[str, Any]], tuple[Messages, Tools]]


# Parse tool schemas and calls in the formats of the data sets


def tool_schemas(functions: Iterable[Any]) -> Tools:
    """Return function descriptions as {"type": "function", "function": {name, description, parameters}}, without unnamed ones."""
    schemas = []
    for value in functions:
        function = (value.get("function") or value) if isinstance(value, Mapping) else {}
        if isinstance(name := function.get("name"), str) and name:
            parameters = {"type": "object", "properties": {}} | _json_schema(function.get("parameters") or {})
            described = {"name": name, "description": str(function.get("description") or ""), "parameters": parameters}
            schemas.append({"type": "function", "function": described})
    return schemas


# JSON Schema's names of the Python types that some sets use
_TYPES = {
    "dict": "object", "float": "number", "int": "integer", "list": "array", "tuple": "array", "str": "string", "bool": "boolean",
}  # fmt: skip


def _json_schema(schema: Any) -> Any:
    """Return a schema with JSON Schema types instead of the Python types ("dict") that some sets use, and without the nulls
    that Parquet adds."""
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: _TYPES.get(value, value) if key == "type" and isinstance(value, str) else _json_schema(value)
        for key, value in schema.items()
        if value is not None
    }


def _json_values(text: str, opening: str) -> Iterator[Any]:
    """Yield the JSON values in a text that begin with `opening`."""
    decoder, position = json.JSONDecoder(), text.find(opening)
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except ValueError:
            position = text.find(opening, position + 1)
            continue
        yield value
        position = text.find(opening, end)


_PAIRS = {"(": ")", "[": "]", "{": "}"}
# A text in quotes, or one character: a bracket, a separator, or a quote that is not closed.
_TOKEN = re.compile(r""""(?:\\.|[^"\\])*+"|'(?:\\.|[^'\\])*+'|[^\w\s]""", re.DOTALL)
NEITHER = "an argument is neither JSON nor a Python literal"


def _split(text: str, separator: str) -> list[str]:
    """Split a text at the separators outside of brackets and quotes. Raises ValueError if brackets or quotes do not match."""
    parts, start = list[str](), 0
    expected: list[str] = []  # closing brackets
    for token in _TOKEN.finditer(text):
        character = token[0]
        if character in _PAIRS:
            expected.append(_PAIRS[character])
        elif character == separator and not expected:
            parts.append(text[start : token.start()])
            start = token.end()
        elif character in "\"'" or (character in ")]}" and (not expected or expected.pop() != character)):
            raise ValueError("brackets or quotes in a call do not match")
    if expected:
        raise ValueError("brackets or quotes in a call do not match")
    return [*parts, text[start:]]


def _call_syntax(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, arguments) of each call in `[Name(a=1, b="x"), Other()]`. Raises ValueError."""
    calls = []
    for part in _split(text.strip()[1:-1], ","):
        name, parenthesis, rest = part.strip().partition("(")
        if not parenthesis or not rest.endswith(")"):
            raise ValueError("a call is not written name(argument=value, ...)")
        arguments = {}
        for pair in _split(rest[:-1], ",") if rest[:-1].strip() else []:
            key, equals, value = pair.partition("=")
            if not equals:
                raise ValueError("an argument of a call has no name")
            arguments[key.strip()] = parse_value(value, NEITHER)
        calls.append((name.strip(), arguments))
    return calls


@dataclass
class _Turn:
    """What one role says: its texts, and for the assistant its calls as (name, arguments)."""

    role: str
    texts: list[str]
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n\n".join(text.strip() for text in self.texts if text.strip())


def _turn(role: str, text: str | None, calls: Iterable[tuple[str, dict[str, Any]]] = ()) -> _Turn:
    return _Turn(role, [text or ""], list(calls))


def _messages(turns: Iterable[_Turn]) -> Messages:
    """Return the messages of a conversation up to the last answer of the assistant. Raises ValueError without one."""
    joined: list[_Turn] = []
    for turn in turns:
        # Parallel calls, their results, or a text that goes on.
        if joined and joined[-1].role == turn.role and not (joined[-1].calls and turn.text):
            joined[-1].texts += turn.texts
            joined[-1].calls += turn.calls
        else:
            joined.append(turn)
    messages: Messages = []
    answered, calls = 0, 0
    for turn in joined:
        if turn.role == "tool":
            messages += [Message(role="tool", content=text) for text in _results(turn.texts, calls)]
        elif turn.role == "assistant":
            calls = len(turn.calls)
            content = tool_calls(turn.calls, turn.text) if calls else reply(turn.text)
            messages.append(Message(role="assistant", content=content))
            answered = len(messages) if turn.text and not calls else answered
        else:
            messages.append(Message(role=turn.role, content=turn.text))  # type: ignore[arg-type]
    if not answered:
        raise ValueError("no answer of the assistant")
    return messages[:answered]


def _results(texts: Sequence[str], calls: int) -> list[str]:
    """Return one text per call. One text for several calls must be a JSON list with one result per call."""
    if len(texts) == calls or not calls:
        return [text.strip() for text in texts]
    results = next(_json_values(texts[0], "["), None) if len(texts) == 1 else None
    if not isinstance(results, list) or len(results) != calls:
        raise ValueError(f"{counted(len(texts), 'tool message')} for {counted(calls, 'call')}")
    return [_text(result) for result in results]


def _text(value: Any) -> str:
    """Return a string unchanged, "" for None, and any other value as JSON."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def _arguments(value: Any) -> dict[str, Any]:
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, dict | None):
        raise ValueError("the arguments of a call are not an object")
    return value or {}


def _pairs(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    turns = row.get("conversations")
    keys = {"from", "value"}
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) and keys <= turn.keys() for turn in turns):
        raise ValueError("conversations is not a list of {from, value}")
    return [(str(turn["from"]), _text(turn["value"])) for turn in turns]


# Converters


def toolace(row: Mapping[str, Any]) -> tuple[Messages, Tools]:
    """Convert Team-ACE/ToolACE: tools as a JSON list in `system`, calls as `[Name(argument=value)]`.

    The system text is dropped, because it describes that call format.
    """
    lists = (value for value in _json_values(str(row.get("system") or ""), "[") if isinstance(value, list))
    functions = next(
        (value for value in lists if any(isinstance(item, dict) and item.get("name") for item in value)), []
    )

    def turn(role: str, value: str) -> _Turn:
        text = value.strip()
        if role not in ("user", "assistant", "tool"):
            raise ValueError(f"unknown role {role!r}")
        if role == "assistant" and text.startswith("[") and text.endswith(")]"):
            return _turn(role, "", _call_syntax(text))
        return _turn(role, text)

    return _messages(turn(*pair) for pair in _pairs(row)), tool_schemas(functions)


def apigen_mt(row: Mapping[str, Any]) -> tuple[Messages, Tools]:
    """Convert Salesforce/APIGen-MT-5k: roles human, gpt, function_call (JSON) and observation; tools as JSON."""
    tools = row.get("tools") or "[]"
    tools = json.loads(tools) if isinstance(tools, str) else tools
    roles = {"human": "user", "gpt": "assistant", "observation": "tool", "system": "system"}

    def turn(role: str, value: str) -> _Turn:
        if role == "function_call":
            called = json.loads(value)
            calls = called if isinstance(called, list) else [called]
            if not all(isinstance(call, dict) and call.get("name") and "arguments" in call for call in calls):
                raise ValueError("a function_call has no name or no arguments")
            return _turn("assistant", "", [(str(call["name"]), _arguments(call["arguments"])) for call in calls])
        if role not in roles:
            raise ValueError(f"unknown role {role!r}")
        return _turn(roles[role], value)

    system = [_turn("system", str(row["system"]))] if row.get("system") else []
    return _messages([*system, *(turn(*pair) for pair in _pairs(row))]), tool_schemas(tools or ())


_GLAIVE_TURN = re.compile(r"(?:\A|(?<=\S)[^\S\n]*+\n)\s*+(USER|ASSISTANT|FUNCTION RESPONSE): ?")
_GLAIVE_CALL = re.compile(r'\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"arguments"\s*:\s*(.*)\}\s*\Z', re.DOTALL)


def _glaive_call(text: str) -> tuple[str, dict[str, Any]]:
    match = _GLAIVE_CALL.match(text.strip())
    if not match:
        raise ValueError("a <functioncall> is not {name, arguments}")
    arguments = match[2].strip()
    if arguments[:1] == arguments[-1:] == "'":
        arguments = arguments[1:-1].replace("\\'", "'")
    return match[1], _arguments(json.loads(arguments))


def glaive_v2(row: Mapping[str, Any]) -> tuple[Messages, Tools]:
    """Convert glaiveai/glaive-function-calling-v2: `system` has one JSON object per function; `chat` is one text with role markers."""
    system = str(row.get("system") or "").removeprefix("SYSTEM:").strip()
    functions = [value for value in _json_values(system, "{") if isinstance(value, dict) and "name" in value]
    roles = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
    turns = [] if functions or not system else [_turn("system", system)]
    pieces = _GLAIVE_TURN.split(str(row.get("chat") or ""))
    for role, text in zip(pieces[1::2], pieces[2::2], strict=True):
        before, *calls = text.replace("<|endoftext|>", "").split("<functioncall>" if role == "ASSISTANT" else "\0")
        turns.append(_turn(roles[role], before, map(_glaive_call, calls)))
    return _messages(turns), tool_schemas(functions)


_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
JSON_REQUEST = 'Reply with one JSON object that has two keys: "code", the program, and "explanation".'


def magicoder(row: Mapping[str, Any]) -> tuple[Messages, Tools]:
    """Convert ise-uiuc/Magicoder-OSS-Instruct-75K (problem, solution) or -Evol-Instruct-110K (instruction, response).

    The answer becomes a JSON object of code and explanation.
    """
    question, solution = row.get("problem") or row.get("instruction"), row.get("solution") or row.get("response")
    if not question or not solution:
        raise ValueError("no problem and solution")
    code = "\n".join(block.strip("\n") for block in _FENCE.findall(solution))
    if not code:
        raise ValueError("the solution has no code block")
    answer = json.dumps({"code": code, "explanation": _FENCE.sub("", solution).strip()}, ensure_ascii=False)
    return _messages([_turn("user", f"{question.strip()}\n\n{JSON_REQUEST}"), _turn("assistant", answer)]), []


def _plain_turns(turns: Any) -> list[_Turn]:
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError("not a list of messages")
    pairs = [(turn.get("role"), turn.get("content") or "") for turn in turns]
    if any(role not in ("system", "user", "assistant") or not isinstance(text, str) for role, text in pairs):
        raise ValueError("a message has no known role or no text")
    return [_turn(role, text) for role, text in pairs if text.strip()]


def tulu3_if(row: Mapping[str, Any]) -> tuple[Messages, Tools]:
    """Convert allenai/tulu-3-sft-personas-instruction-following: messages of {role, content}."""
    return _messages(_plain_turns(row.get("messages"))), []


_LLAMA_TURN = re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n*(.*?)(?:<\|eot_id\|>|\Z)", re.DOTALL)


def nemotron_chat(row: Mapping[str, Any]) -> tuple[Messages, Tools]:
    """Convert nvidia/Llama-Nemotron-Post-Training-Dataset, split chat: `input` is a text, a Llama prompt or messages.

    Rows with reasoning are rejected. The system prompt that turns reasoning off is dropped.
    """
    given, output = row.get("input"), row.get("output")
    if isinstance(given, str):
        headers = _LLAMA_TURN.findall(given)
        given = [{"role": role, "content": text} for role, text in headers] or [{"role": "user", "content": given}]
    if not isinstance(output, str) or not output.strip():
        raise ValueError("no output")
    answer = re.sub(r"\A\s*<think>.*?</think>", "", output.replace("<|eot_id|>", ""), flags=re.DOTALL)
    turns = _plain_turns(given)
    switches = [turn.text for turn in turns if turn.text.startswith("detailed thinking ")]
    if row.get("reasoning") == "on" or "detailed thinking on" in switches or answer.lstrip().startswith("<think>"):
        raise ValueError("the answer has reasoning")
    return _messages([*(turn for turn in turns if turn.text not in switches), _turn("assistant", answer)]), []


CONVERTERS: dict[str, Converter] = {
    converter.__name__: converter for converter in (toolace, apigen_mt, glaive_v2, magicoder, tulu3_if, nemotron_chat)
}


# Files


@dataclass
class ConversionReport:
    """Counts of a conversion.

    refused: number of rejected rows by reason. examples: one rejected row for each reason.
    """

    source: str
    rows: int = 0
    converted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def refuse(self, reason: str, where: str) -> None:
        """Count a row that is rejected. where: file and row number."""
        self.refused[reason] += 1
        self.examples.setdefault(reason, where)


def convert(
    source: str, rows: Iterable[tuple[int, Any]], origin: str, report: ConversionReport
) -> Iterator[Conversation]:
    """Yield the conversations of a data set that can be converted and pass `lint`; count the other rows in the report.

    source: name in CONVERTERS. rows: (row number, row). origin: file name, used in the report.
    """
    for number, row in rows:
        report.rows += 1
        where = f"{origin} row {number}"
        try:
            messages, tools = CONVERTERS[source](row)
            conversation = Conversation(
                conversation_id=f"{source}-{number}", source=source, messages=tuple(messages), tools=tuple(tools)
            )
        except (DataError, ValueError, KeyError, TypeError, AttributeError) as error:
            report.refuse(_reason(error), where)
            continue
        if findings := lint(conversation):
            report.refuse(findings[0].rule, f"{where}: {findings[0]}")
            continue
        report.converted += 1
        yield conversation


def _reason(error: Exception) -> str:
    """Return the reason of an error without values of the row, so that rows with the same reason are counted together."""
    if isinstance(error, ValidationError):
        detail = error.errors()[0]
        return f"{'.'.join(map(str, detail['loc'][:1]))}: {detail['msg']}"
    if isinstance(error, json.JSONDecodeError):
        return "not JSON"
    if isinstance(error, DataError):
        return NEITHER
    return str(error) if type(error) is ValueError else f"not in the schema of the set ({type(error).__name__})"
