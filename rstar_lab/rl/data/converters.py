"""From public conversation sets to ours: a function a schema, which takes a row and returns (messages, tools).

What a converter cannot read it refuses with a ValueError that says why; `convert` counts those and shows examples.
The sets are the paper's (section 4.1): function calls, code as JSON, instruction following, chat.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rstar_lab.rl.chat_format.conversations import Conversation, Message, reply, tool_calls
from rstar_lab.rl.data.lint import lint
from rstar_lab.rl.problems import read_rows

Messages = list[Message]
Tools = list[dict[str, Any]]
Converter = Callable[[Mapping[str, Any]], tuple[Messages, Tools]]


# --- tools and values as the sets write them --------------------------------------------------------------------------


def tool_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function's description, in whichever form, as {"type": "function", "function": {name, description,
    parameters}}."""
    function = function.get("function", function) if function.get("type") == "function" else function
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("a tool has no name")
    parameters = _objects(function.get("parameters") or {})
    parameters.setdefault("type", "object")
    parameters.setdefault("properties", {})
    description = str(function.get("description") or "")
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _objects(schema: Any) -> Any:
    """A schema with the Python type names that some sets use ("dict") in JSON schema's words."""
    if isinstance(schema, list):
        return [_objects(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    names = {
        "dict": "object",
        "float": "number",
        "int": "integer",
        "list": "array",
        "tuple": "array",
        "str": "string",
        "bool": "boolean",
    }
    return {
        key: names.get(value, value) if key == "type" and isinstance(value, str) else _objects(value)
        for key, value in schema.items()
    }


def _json_values(text: str, opening: str) -> Iterator[Any]:
    """The JSON values in a text that begin with `opening`, one after the other."""
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


def _split(text: str, separator: str) -> list[str]:
    """text.split(separator), but not inside brackets or quotes. Raises ValueError where those do not match."""
    parts, start, expected, quote = [], 0, [], ""
    position = 0
    while position < len(text):
        character = text[position]
        if quote:
            if character == "\\":
                position += 1
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in _PAIRS:
            expected.append(_PAIRS[character])
        elif character in _PAIRS.values():
            if not expected or expected.pop() != character:
                raise ValueError("brackets in a call do not match")
        elif character == separator and not expected:
            parts.append(text[start:position])
            start = position + 1
        position += 1
    if expected or quote:
        raise ValueError("brackets or quotes in a call do not match")
    return [*parts, text[start:]]


def _value(text: str) -> Any:
    text = text.strip()
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    raise ValueError("an argument is neither JSON nor a Python literal")


def _call_syntax(text: str) -> list[tuple[str, dict[str, Any]]]:
    """`[Name of it(a=1, b="x"), Other()]` as names and arguments."""
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
            arguments[key.strip()] = _value(value)
        calls.append((name.strip(), arguments))
    return calls


def _tool_answers(text: str, calls: int) -> Messages:
    """One message a call, where the answer is a JSON list of as many results; else one for all."""
    if calls > 1:
        try:
            results = json.loads(text)
        except ValueError:
            results = None
        if isinstance(results, list) and len(results) == calls:
            return [
                Message(role="tool", content=one if isinstance(one, str) else json.dumps(one, ensure_ascii=False))
                for one in results
            ]
        raise ValueError(f"one tool answer for {calls} calls")
    return [Message(role="tool", content=text)]


def _turns(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    turns = row.get("conversations")
    if not isinstance(turns, list) or not all(
        isinstance(turn, Mapping) and "from" in turn and "value" in turn for turn in turns
    ):
        raise ValueError("conversations is not a list of {from, value}")
    return [(str(turn["from"]), str(turn["value"])) for turn in turns]


# --- the sets ---------------------------------------------------------------------------------------------------------


def toolace(row: Mapping[str, Any]) -> tuple[Messages, Tools]:
    """Team-ACE/ToolACE: tools as a JSON list within `system`, calls as `[Name(argument=value)]`. Its system text
    describes that other call format, so it does not come along."""
    lists = (value for value in _json_values(str(row.get("system") or ""), "[") if isinstance(value, list))
    functions = next(
        (value for value in lists if value and all(isinstance(one, dict) and "name" in one for one in value)), []
    )
    messages: Messages = []
    calls = 0
    for role, value in _turns(row):
        text = value.strip()
        if role == "user":
            messages.append(Message(role="user", content=text))
        elif role == "assistant":
            called = _call_syntax(text) if text.startswith("[") and text.endswith(")]") else []
            calls = len(called)
            messages.append(Message(role="assistant", content=tool_calls(called) if called else reply(text)))
        elif role == "tool":
            messages += _tool_answers(text, calls)
        else:
            raise ValueError(f"unknown speaker {role!r}")
    return messages, [tool_schema(function) for function in functions]


def apigen_mt(row: Mapping[str, Any]) -> tuple[Messages, Tools]:
    """Salesforce/APIGen-MT-5k: human, gpt, function_call (JSON), observation; tools as JSON; system holds the
    policy."""
    tools = row.get("tools") or "[]"
    tools = json.loads(tools) if isinstance(tools, str) else tools
    messages = [Message(role="system", content=str(row["system"]).strip())] if row.get("system") else []
    for role, value in _turns(row):
        if role == "human":
            messages.append(Message(role="user", content=value.strip()))
        elif role == "gpt":
            messages.append(Message(role="assistant", content=reply(value)))
        elif role == "function_call":
            call = json.loads(value)
            arguments = call["arguments"] if isinstance(call, dict) and "arguments" in call else None
            if not isinstance(arguments, dict):
                raise ValueError("a function_call has no arguments")
            messages.append(Message(role="assistant", content=tool_calls([(str(call.get("name")), arguments)])))
        elif role == "observation":
            messages.append(Message(role="tool", content=value.strip()))
        else:
            raise ValueError(f"unknown speaker {role!r}")
    return messages, [tool_schema(tool) for tool in tools]


_GLAIVE_TURN = re.compile(r"(?:\A|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE): ?")
_GLAIVE_CALL = re.compile(r'\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"arguments"\s*:\s*(.*)\}\s*\Z', re.DOTALL)


def _glaive_call(text: str) -> tuple[str, dict[str, Any]]:
    match = _GLAIVE_CALL.match(text.strip())
    if not match:
        raise ValueError("a <functioncall> is not {name, arguments}")
    arguments = match[2].strip()
    if arguments[:1] == arguments[-1:] == "'":
        arguments = arguments[1:-1].replace("\\'", "'")
    value = json.loads(arguments)
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError("the arguments of a <functioncall> are no object")
    return match[1], value


def glaive_v2(row: Mapping[str, Any]) -> tuple[Messages, Tools]:
    """glaiveai/glaive-function-calling-v2: `system` with one JSON object a function, `chat` as one text with
    speakers."""
    system = str(row.get("system") or "").removeprefix("SYSTEM:").strip()
    functions = [value for value in _json_values(system, "{") if isinstance(value, dict) and "name" in value]
    messages = [] if functions or not system else [Message(role="system", content=system)]
    pieces = _GLAIVE_TURN.split(str(row.get("chat") or ""))
    for role, text in zip(pieces[1::2], pieces[2::2], strict=True):
        text = text.replace("<|endoftext|>", "").strip()
        if role == "USER":
            messages.append(Message(role="user", content=text))
        elif role == "FUNCTION RESPONSE":
            messages.append(Message(role="tool", content=text))
        else:
            said, *calls = text.split("<functioncall>")
            content = tool_calls([_glaive_call(call) for call in calls], said) if calls else reply(said)
            messages.append(Message(role="assistant", content=content))
    return messages, [tool_schema(function) for function in functions]


_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
JSON_REQUEST = 'Reply with one JSON object that has two keys: "code", the program, and "explanation".'


def magicoder(row: Mapping[str, Any]) -> tuple[Messages, Tools]:
    """ise-uiuc/Magicoder-OSS-Instruct-75K (problem, solution) or -Evol-Instruct-110K (instruction, response), the
    answer as JSON."""
    question, solution = row.get("problem") or row.get("instruction"), row.get("solution") or row.get("response")
    if not question or not solution:
        raise ValueError("no problem and solution")
    code = "\n".join(block.strip("\n") for block in _FENCE.findall(solution))
    if not code:
        raise ValueError("the solution has no block of code")
    answer = json.dumps({"code": code, "explanation": _FENCE.sub("", solution).strip()}, ensure_ascii=False)
    return [
        Message(role="user", content=f"{question.strip()}\n\n{JSON_REQUEST}"),
        Message(role="assistant", content=reply(answer)),
    ], []


def _plain_turns(turns: Any) -> Messages:
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError("not a list of messages")
    messages = []
    for turn in turns:
        role, content = turn.get("role"), turn.get("content")
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise ValueError("a message has no known role or no text")
        messages.append(Message(role=role, content=reply(content) if role == "assistant" else content.strip()))
    return messages


def tulu3_if(row: Mapping[str, Any]) -> tuple[Messages, Tools]:
    """allenai/tulu-3-sft-personas-instruction-following: messages of {role, content}."""
    return _plain_turns(row.get("messages")), []


_LLAMA_TURN = re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n*(.*?)(?:<\|eot_id\|>|\Z)", re.DOTALL)


def nemotron_chat(row: Mapping[str, Any]) -> tuple[Messages, Tools]:
    """nvidia/Llama-Nemotron-Post-Training-Dataset, split chat: `input` a text, a Llama prompt or messages; `output`.

    Only answers without reasoning; the system prompt that switches reasoning is left out.
    """
    if str(row.get("reasoning", "off")) == "on":
        raise ValueError("an answer with reasoning")
    given, output = row.get("input"), row.get("output")
    if isinstance(given, str):
        headers = _LLAMA_TURN.findall(given)
        given = [{"role": role, "content": text} for role, text in headers] or [{"role": "user", "content": given}]
        given = [turn for turn in given if turn["content"].strip()]
    if not isinstance(output, str) or not output.strip():
        raise ValueError("no output")
    answer = re.sub(r"\A\s*<think>.*?</think>", "", output.replace("<|eot_id|>", ""), flags=re.DOTALL)
    messages = [message for message in _plain_turns(given) if not message.content.startswith("detailed thinking ")]
    return [*messages, Message(role="assistant", content=reply(answer))], []


CONVERTERS: dict[str, Converter] = {
    "toolace": toolace,
    "apigen_mt": apigen_mt,
    "glaive_v2": glaive_v2,
    "magicoder": magicoder,
    "tulu3_if": tulu3_if,
    "nemotron_chat": nemotron_chat,
}


# --- a whole file -----------------------------------------------------------------------------------------------------


@dataclass
class ConversionReport:
    """What became of a file's rows. refused: how many by reason; examples: a row for each reason."""

    source: str
    rows: int = 0
    converted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def refuse(self, reason: str, where: str) -> None:
        self.refused[reason] += 1
        self.examples.setdefault(reason, where)


def convert(
    source: str, rows: Iterable[tuple[int, Any]], origin: str, report: ConversionReport
) -> Iterator[Conversation]:
    """The conversations of one set's rows; each passes the linter. What is refused, and why, is added to the report."""
    for number, row in rows:
        report.rows += 1
        where = f"{origin} row {number}"
        try:
            messages, tools = CONVERTERS[source](row)
            conversation = Conversation(
                conversation_id=f"{source}-{number}", source=source, messages=tuple(messages), tools=tuple(tools)
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            report.refuse(_reason(error), where)
            continue
        if findings := lint(conversation):
            report.refuse(findings[0].rule, f"{where}: {findings[0]}")
            continue
        report.converted += 1
        yield conversation


def _reason(error: Exception) -> str:
    """What is wrong in words that do not differ from row to row, so that they can be counted."""
    if isinstance(error, ValidationError):
        detail = error.errors()[0]
        return f"{'.'.join(map(str, detail['loc'][:1]))}: {detail['msg']}"
    if isinstance(error, json.JSONDecodeError):
        return "not JSON"
    return str(error) if type(error) is ValueError else f"not in this set's schema ({type(error).__name__})"


def convert_file(source: str, path: Path, report: ConversionReport) -> Iterator[Conversation]:
    """`convert` for a .jsonl, .json or .parquet file."""
    return convert(source, read_rows(path), str(path), report)
