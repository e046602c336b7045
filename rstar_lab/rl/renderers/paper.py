"""The chat format: one template for SFT, rollout and evaluation, and the schemas of the code tools.

An assistant turn is `<reason>…</reason>`, followed by `<tool_call>{json}</tool_call>` blocks or by
`<answer>…\\boxed{}…</answer>`. Generation starts after `<reason>`, so that tag belongs to the prompt and not to the
loss. The tool responses to one turn form one user turn of `<tool_response>` blocks, in the order of the calls. Source:
rStar2-Agent, section 2 (prompt and tool format).

`render_segments` is the template in Python, with the loss mask; `chat_template` is the same template in Jinja.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rstar_lab.rl.renderers import base
from rstar_lab.rl.renderers.base import END_OF_TURN, Messages, PromptFormat, Renderer, Schemas, Texts

SPECIAL_TOKENS = ("<|im_start|>", END_OF_TURN, "<|endoftext|>")
FORMAT_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CONTROL_TOKENS = (*SPECIAL_TOKENS, *FORMAT_TAGS)
_TAG = re.compile(r"[<\[]\S*[>\]]")
GENERATION_PREFIX = "<|im_start|>assistant\n<reason>"

SYSTEM_PROMPT = (
    "You solve problems step by step and may run Python code to compute or to check. "
    "Think inside <reason> and </reason>, then either call a tool or give the answer."
)

ANSWER_REQUEST = (
    "Give the final answer inside <answer> and </answer>, with the result itself in \\boxed{}: "
    "<answer>\\boxed{result}</answer>."
)

TOOLS_INTRO = (
    "# Tools\nThese functions may be called, one JSON schema a line:\n<tools>\n",
    "</tools>\nTo call one, write its name and its arguments as one JSON object inside <tool_call> tags:\n"
    '<tool_call>\n{"name": "function name", "arguments": {"argument": "value"}}\n</tool_call>',
)


def function_schema(name: str, description: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    """Return the schema of a function whose arguments are texts. arguments: description of each."""
    properties = {argument: {"type": "string", "description": text} for argument, text in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_STDIO = {"code": "The program.", "input": "What it reads from standard input; may be empty."}
CODE_TOOL = function_schema(
    "execute_python_code_with_standard_io", "Runs a Python program and returns what it prints.", _STDIO
)
RELEASED_TOOL = function_schema(
    "python_code_with_standard_io", "Runs a Python program and returns what it prints.", _STDIO
)
JUPYTER_TOOL = function_schema(
    "jupyter_code", "Runs a cell in a Python session that keeps what earlier cells defined.", {"code": "The cell."}
)


# --- rendering -------------------------------------------------------------------------------------------------------


def format_question(question: str) -> str:
    """Return the content of the user turn that asks `question`."""
    return base.format_question(question, ANSWER_REQUEST)


def control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the strings that user text and tool output must not contain: the special tokens of the tokenizer, its other
    added tokens that have the form of a tag, and the tags of the chat format. Longest first."""
    added = tokenizer.added_tokens_decoder.values()
    special_or_tag = {token.content for token in added if token.special or _TAG.fullmatch(token.content)}
    return tuple(sorted({*CONTROL_TOKENS, *special_or_tag} - {""}, key=lambda token: (-len(token), token)))


def neutralise(text: str, tokens: Sequence[str] = CONTROL_TOKENS) -> str:
    """Return `text` with a space after the first character of every control token, so that it is encoded as text."""
    for token in tokens:
        text = text.replace(token, _neutralised(token))
    return text


def _neutralised(token: str) -> str:
    return f"{token[0]} {token[1:]}"


def render_tool_call(name: str, arguments: Mapping[str, Any] | str) -> str:
    """Return one call as the model writes it. arguments: a mapping, or JSON."""
    encoded = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {encoded}}}\n</tool_call>'


def assistant_text(message: Mapping[str, Any]) -> str:
    """Return what the model writes in an assistant message, without the opening `<reason>` of the prompt."""
    text = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        text += ("\n" if text else "") + render_tool_call(function["name"], function["arguments"])
    return text.removeprefix("<reason>")


def render_segments(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[dict] = (),
    add_generation_prompt: bool = False,
    control_tokens: Sequence[str] = CONTROL_TOKENS,
) -> list[tuple[str, bool]]:
    """Return the conversation as (text, generated by the model) pieces; joined they equal the output of `chat_template`.

    The pieces of the model are everything in an assistant turn after `<reason>`, including END_OF_TURN. Tokenize piece by
    piece, so that the loss mask is exact and the tokens equal those of a rollout. messages: {role, content}; assistant
    messages may have `tool_calls` in OpenAI's form; tool responses have the role `tool`. control_tokens: neutralised in
    system, user and tool messages.
    """

    def plain(text: str) -> str:
        return neutralise(text, control_tokens)

    pieces: list[tuple[str, bool]] = []
    system = messages[0].get("content") or "" if messages and messages[0]["role"] == "system" else ""
    if tools:
        schemas = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
        lead = plain(system) + ("\n\n" if system else "")
        pieces.append((f"<|im_start|>system\n{lead}{schemas.join(TOOLS_INTRO)}{END_OF_TURN}\n", False))
    elif system:
        pieces.append((f"<|im_start|>system\n{plain(system)}{END_OF_TURN}\n", False))
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "assistant":
            pieces += [(GENERATION_PREFIX, False), (assistant_text(message) + END_OF_TURN, True), ("\n", False)]
        elif role == "tool":
            first = i == 0 or messages[i - 1]["role"] != "tool"
            last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            opening, closing = "<|im_start|>user" if first else "", f"{END_OF_TURN}\n" if last else ""
            pieces.append((f"{opening}\n<tool_response>\n{plain(content)}\n</tool_response>{closing}", False))
        elif role != "system" or i:
            pieces.append((f"<|im_start|>{role}\n{plain(content)}{END_OF_TURN}\n", False))
    if add_generation_prompt:
        pieces.append((GENERATION_PREFIX, False))
    return pieces


# Writes the calls of an assistant message in Jinja, for every chat template whose calls are JSON in <tool_call> tags.
TOOL_CALLS_JINJA = (
    "{%- for call in message.tool_calls or [] -%}\n"
    "{%- set function = call.function if call.function else call -%}\n"
    "{{- ('\\n' if content or not loop.first else '') + '<tool_call>\\n{\"name\": ' + (function.name | tojson) -}}\n"
    "{{- ', \"arguments\": ' -}}\n"
    "{{- function.arguments if function.arguments is string else (function.arguments | tojson) -}}\n"
    "{{- '}\\n</tool_call>' -}}\n"
    "{%- endfor -%}\n"
)


def chat_template(control_tokens: Sequence[str] = CONTROL_TOKENS) -> str:
    """Return the chat format as a Jinja template for a tokenizer. control_tokens: neutralised by the template."""
    replacements = "".join(f" | replace({token!r}, {_neutralised(token)!r})" for token in control_tokens)
    return (
        "{%- macro plain(text) -%}{{- text" + replacements + " -}}{%- endmacro -%}\n"
        "{%- set system = (messages[0].content or '') if messages and messages[0].role == 'system' else '' -%}\n"
        "{%- if tools -%}\n"
        "{{- '<|im_start|>system\\n' + plain(system) + ('\\n\\n' if system else '') -}}\n"
        "{{- " + json.dumps(TOOLS_INTRO[0]) + " -}}\n"
        "{%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}\n"
        "{{- " + json.dumps(TOOLS_INTRO[1]) + " + '<|im_end|>\\n' -}}\n"
        "{%- elif system -%}\n"
        "{{- '<|im_start|>system\\n' + plain(system) + '<|im_end|>\\n' -}}\n"
        "{%- endif -%}\n"
        "{%- for message in messages -%}\n"
        "{%- set content = message.content or '' -%}\n"
        "{%- if message.role == 'assistant' -%}\n"
        "{{- '<|im_start|>assistant\\n' + ('' if content.startswith('<reason>') else '<reason>') + content -}}\n"
        + TOOL_CALLS_JINJA
        + "{{- '<|im_end|>\\n' -}}\n"
        "{%- elif message.role == 'tool' -%}\n"
        "{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}\n"
        "{{- '\\n<tool_response>\\n' + plain(content) + '\\n</tool_response>' -}}\n"
        "{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}\n"
        "{%- elif message.role != 'system' or not loop.first -%}\n"
        "{{- '<|im_start|>' + message.role + '\\n' + plain(content) + '<|im_end|>\\n' -}}\n"
        "{%- endif -%}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<reason>' -}}{%- endif -%}"
    )


CHAT_TEMPLATE = chat_template()


# --- the format ------------------------------------------------------------------------------------------------------

_TOOLS = {"python": CODE_TOOL, "python_released": RELEASED_TOOL, "jupyter": JUPYTER_TOOL}
_TOOLS |= {tool["function"]["name"]: tool for tool in _TOOLS.values()}


class PaperRenderer(Renderer):
    """The format of the paper."""

    name: ClassVar[PromptFormat] = "paper"
    system_prompt = SYSTEM_PROMPT
    answer_request = ANSWER_REQUEST
    code_tools = _TOOLS
    default_control_tokens: ClassVar[tuple[str, ...]] = CONTROL_TOKENS

    def prompt(self, question: str, schemas: Sequence[dict[str, Any]]) -> str:
        """Return the first prompt, up to the start of generation. Without tools and system prompt there is no system turn."""
        system = SYSTEM_PROMPT if self.style.system is None else self.style.system
        messages = [{"role": "system", "content": system}] if system else []
        return self._text([*messages, {"role": "user", "content": self.question_turn(question)}], schemas)

    def continuation(self, results: Texts, user_text: str | None = None, *, names: Texts = (), ended: str = "") -> str:
        messages = [{"role": "tool", "content": text} for text in results]
        if user_text is not None:
            messages.append({"role": "user", "content": user_text})
        return "\n" + self._text(messages)

    def _text(self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[dict[str, Any]] = ()) -> str:
        pieces = render_segments(
            messages, tools=schemas, add_generation_prompt=True, control_tokens=self.control_tokens
        )
        return "".join(piece for piece, _ in pieces)

    @classmethod
    def chat_template(cls, control_tokens: Sequence[str]) -> str:
        return chat_template(control_tokens)

    @classmethod
    def segments(cls, messages: Messages, tools: Schemas, control_tokens: Texts = ()) -> list[tuple[str, bool]]:
        return render_segments(messages, tools=tools, control_tokens=control_tokens)
