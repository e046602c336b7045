"""The chat format: one template for SFT, rollout and evaluation, the tools, and the parser of tool calls.

An assistant turn is `<reason>…</reason>`, then `<tool_call>{json}</tool_call>` blocks or
`<answer>…\\boxed{}…</answer>`. Generation starts after `<reason>`, so that tag belongs to the prompt and never to the
loss. The answers of the tools to one turn go, in order, as `<tool_response>` blocks into one user turn. Source:
rStar2-Agent, section 2 (prompt and tool format).

`render_segments` is the template in Python, with the loss mask; `CHAT_TEMPLATE` is the same in Jinja, for tokenizers.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from rstar_lab.outcomes import Outcome

END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = ("<|im_start|>", END_OF_TURN, "<|endoftext|>")
GENERATION_PREFIX = "<|im_start|>assistant\n<reason>"

SYSTEM_PROMPT = (
    "You solve problems step by step and may run Python code to compute or to check. "
    "Think inside <reason> and </reason>, then either call a tool or give the answer."
)

ANSWER_REQUEST = (
    "Give the final answer inside <answer> and </answer>, with the result itself in \\boxed{}: "
    "<answer>\\boxed{result}</answer>."
)

_TOOLS_INTRO = (
    "# Tools\nThese functions may be called, one JSON schema a line:\n<tools>\n",
    "</tools>\nTo call one, write its name and its arguments as one JSON object inside <tool_call> tags:\n"
    '<tool_call>\n{"name": "function name", "arguments": {"argument": "value"}}\n</tool_call>',
)


def _function(name: str, description: str, **arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string", "description": text} for argument, text in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_STDIO = {"code": "The program.", "input": "What it reads from standard input; may be empty."}
CODE_TOOL = _function(
    "execute_python_code_with_standard_io", "Runs a Python program and returns what it prints.", **_STDIO
)
RELEASED_TOOL = _function("python_code_with_standard_io", "Runs a Python program and returns what it prints.", **_STDIO)
JUPYTER_TOOL = _function(
    "jupyter_code", "Runs a cell in a Python session that keeps what earlier cells defined.", code="The cell."
)


# --- rendering -------------------------------------------------------------------------------------------------------


def format_question(question: str) -> str:
    """The content of the user turn that poses `question`."""
    return f"{question}\n\n{ANSWER_REQUEST}"


def _plain(text: str) -> str:
    # Text from outside must not turn into control tokens when it is encoded.
    for token in SPECIAL_TOKENS:
        text = text.replace(token, token.replace("<|", "< |"))
    return text


def render_tool_call(name: str, arguments: Mapping[str, Any] | str) -> str:
    """One call as the model writes it. Arguments given as a string are taken as JSON already."""
    encoded = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {encoded}}}\n</tool_call>'


def _assistant_text(message: Mapping[str, Any]) -> str:
    text = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        text += ("\n" if text else "") + render_tool_call(function["name"], function["arguments"])
    return text.removeprefix("<reason>")


def render_segments(
    messages: Sequence[Mapping[str, Any]], *, tools: Sequence[dict] = (), add_generation_prompt: bool = False
) -> list[tuple[str, bool]]:
    """The conversation as (text, is_the_model's_own) pieces; joined they equal CHAT_TEMPLATE's output.

    The model's own pieces are what it generates: all of an assistant turn after `<reason>`, END_OF_TURN included.
    Tokenize piece by piece, so that the loss mask is exact and equals what a rollout sees. Messages are {role,
    content}, assistant messages may carry `tool_calls` (OpenAI's form), tool answers have the role `tool`.
    """
    pieces: list[tuple[str, bool]] = []
    system = messages[0].get("content") or "" if messages and messages[0]["role"] == "system" else ""
    if tools:
        schemas = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
        lead = _plain(system) + ("\n\n" if system else "")
        pieces.append((f"<|im_start|>system\n{lead}{schemas.join(_TOOLS_INTRO)}{END_OF_TURN}\n", False))
    elif system:
        pieces.append((f"<|im_start|>system\n{_plain(system)}{END_OF_TURN}\n", False))
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "assistant":
            pieces += [(GENERATION_PREFIX, False), (_assistant_text(message) + END_OF_TURN, True), ("\n", False)]
        elif role == "tool":
            first = i == 0 or messages[i - 1]["role"] != "tool"
            last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            opening, closing = "<|im_start|>user" if first else "", f"{END_OF_TURN}\n" if last else ""
            pieces.append((f"{opening}\n<tool_response>\n{_plain(content)}\n</tool_response>{closing}", False))
        elif role != "system" or i:
            pieces.append((f"<|im_start|>{role}\n{_plain(content)}{END_OF_TURN}\n", False))
    if add_generation_prompt:
        pieces.append((GENERATION_PREFIX, False))
    return pieces


def render_prompt(question: str, *, tools: Sequence[dict] = (CODE_TOOL,), system: str = SYSTEM_PROMPT) -> str:
    """The prompt of a rollout, up to and with the generation prefix. Without tools and system there is no system
    turn."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": format_question(question)})
    return "".join(text for text, _ in render_segments(messages, tools=tools, add_generation_prompt=True))


def render_tool_responses(texts: Iterable[str]) -> str:
    """What follows an assistant turn's END_OF_TURN: the answers of its calls, in their order, and the next prefix."""
    answers = [{"role": "tool", "content": text} for text in texts]
    return "\n" + "".join(text for text, _ in render_segments(answers, add_generation_prompt=True))


_PLAIN_JINJA = "".join(f" | replace({token!r}, {token.replace('<|', '< |')!r})" for token in SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{%- set system = (messages[0].content or '') if messages and messages[0].role == 'system' else '' -%}\n"
    "{%- if tools -%}\n"
    "{{- '<|im_start|>system\\n' + (system" + _PLAIN_JINJA + ") + ('\\n\\n' if system else '') -}}\n"
    "{{- " + json.dumps(_TOOLS_INTRO[0]) + " -}}\n"
    "{%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}\n"
    "{{- " + json.dumps(_TOOLS_INTRO[1]) + " + '<|im_end|>\\n' -}}\n"
    "{%- elif system -%}\n"
    "{{- '<|im_start|>system\\n' + (system" + _PLAIN_JINJA + ") + '<|im_end|>\\n' -}}\n"
    "{%- endif -%}\n"
    "{%- for message in messages -%}\n"
    "{%- set content = message.content or '' -%}\n"
    "{%- if message.role == 'assistant' -%}\n"
    "{{- '<|im_start|>assistant\\n' + ('' if content.startswith('<reason>') else '<reason>') + content -}}\n"
    "{%- for call in message.tool_calls or [] -%}\n"
    "{%- set function = call.function if call.function else call -%}\n"
    "{{- ('\\n' if content or not loop.first else '') + '<tool_call>\\n{\"name\": ' + (function.name | tojson) -}}\n"
    "{{- ', \"arguments\": ' -}}\n"
    "{{- function.arguments if function.arguments is string else (function.arguments | tojson) -}}\n"
    "{{- '}\\n</tool_call>' -}}\n"
    "{%- endfor -%}\n"
    "{{- '<|im_end|>\\n' -}}\n"
    "{%- elif message.role == 'tool' -%}\n"
    "{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}\n"
    "{{- '\\n<tool_response>\\n' + (content" + _PLAIN_JINJA + ") + '\\n</tool_response>' -}}\n"
    "{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}\n"
    "{%- elif message.role != 'system' or not loop.first -%}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + (content" + _PLAIN_JINJA + ") + '<|im_end|>\\n' -}}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<reason>' -}}{%- endif -%}"
)


class _Result(Protocol):
    """What is read of the sandbox's CallResult."""

    @property
    def outcome(self) -> Outcome: ...
    @property
    def stdout(self) -> str: ...
    @property
    def stderr(self) -> str: ...
    @property
    def value(self) -> str | None: ...


_ENDINGS = {
    Outcome.TIMEOUT: "TimeoutError: the code ran past its time limit and was stopped.",
    Outcome.MEMORY: "MemoryError: the code went past its memory limit and was stopped.",
    Outcome.OUTPUT_LIMIT: "OutputLimitError: the code printed too much and was stopped.",
    Outcome.KILLED: "KilledError: the process ended before the code did.",
    Outcome.SANDBOX_ERROR: "The code could not be run. This is no fault of the code.",
    Outcome.QUEUE_TIMEOUT: "The code waited too long to be run. This is no fault of the code.",
}


def render_tool_result(result: _Result) -> str:
    """The text of a call's result as the model sees it: what was printed, then the value of the last expression, the
    traceback, or the limit that was hit. No measured time goes in: the same result gives the same tokens."""
    if result.outcome is Outcome.OK:
        parts = [result.stdout, result.value or ""]
    elif result.outcome in _ENDINGS:
        parts = [result.stdout, _ENDINGS[result.outcome]]
    else:
        parts = [result.stdout, result.stderr]
    return "\n".join(part.rstrip("\n") for part in parts if part.strip("\n"))


# --- parsing ---------------------------------------------------------------------------------------------------------


# --- answers ---------------------------------------------------------------------------------------------------------
