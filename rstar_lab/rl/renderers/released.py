"""The prompt format of the released rStar2-Agent-14B: prompts, tool schemas and tool responses.

The sentences are those the model was trained on. Source: microsoft/rStar at ecbfb943, Copyright (c) Microsoft
Corporation, MIT license: rstar2_agent/config/rstar2_agent_trainer.yaml (chat template),
rstar2_agent/config/tool_config/*.yaml (tool schemas), rstar2_agent/tools/code_judge_utils.py (texts of results),
rstar2_agent/tools/tool_parser.py and rstar2_agent/rollout/rstar2_agent_loop.py (errors, truncation).

Like the release, this module inserts questions and tool output unchanged: text such as `<|im_end|>` in them becomes a
control token. Its callers in rollouts and SFT neutralise such text first.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.renderers.base import END_OF_TURN, Renderer, TruncateSide
from rstar_lab.rl.renderers.paper import (
    ANSWER_REQUEST,
    TOOL_CALLS_JINJA,
    RenderedResult,
    assistant_text,
    function_schema,
    neutralise,
)
from rstar_lab.tool_calls import ToolCall

GENERATION_PREFIX = "<|im_start|>assistant\n<reason>"

SYSTEM_PROMPT = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning "
    "process is enclosed within <reason> </reason> and answer is enclosed within <answer> </answer> tags, "
    "respectively, i.e., <reason> reasoning process here </reason> <answer> answer here </answer>."
)
QUESTION_PREFIX = (
    "You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final "
    "answer will be extracted automatically by the \\boxed{} tag.\nThis is the problem:\n"
)
TOOLS_BEGIN = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_END = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


_STDIO: tuple[str, dict[str, str]] = (
    "Execute Python code with standard input and capture standard output. This function takes a Python code string and "
    "an input string, provides the input string through standard input (stdin) to the code, and captures and returns "
    "any output produced through standard output (stdout). If the executed code raises an exception, the error message "
    "will be captured and returned instead.",
    {
        "code": "A string containing Python code to be executed. The code can read from standard input using the "
        "input() function.",
        "input": "A string that will be provided as standard input to the code when it calls input().",
    },
)
PYTHON_TOOL = function_schema("python_code_with_standard_io", *_STDIO)
CARD_TOOL = function_schema(
    "execute_python_code_with_standard_io", *_STDIO
)  # in the card of rstar2-reproduce/rStar2-Agent-14B
JUPYTER_TOOL = function_schema(
    "jupyter_code",
    "Execute python code in a Jupyter notebook cell and return result",
    {"code": "The python code to execute in a single cell"},
)


def render_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the part of the system turn that describes the tools; empty without tools. tools: function schemas."""
    if not tools:
        return ""
    schemas = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"{TOOLS_BEGIN}{schemas}{TOOLS_END}"


class _TimedResult(RenderedResult, Protocol):
    """The fields of the sandbox's CallResult that are rendered."""

    @property
    def duration_s(self) -> float: ...


# From 0xWJ/code-judge, the judge of the release: MAX_STDOUT_ERROR_LENGTH and the line that its time-out handler prints.
_MAX_STREAM_CHARS = 1000
_TIMEOUT_LINE = "Suicide from timeout.\n"
_REASONS = {
    Outcome.QUEUE_TIMEOUT: "queue_timeout",
    Outcome.SANDBOX_ERROR: "internal_error",
}


# --- whole conversations: pieces for SFT, and a chat template for servers -----------------------------------------------
#
# Both render what a rollout contains. A tool response follows the end-of-turn token directly, and only questions have
# QUESTION_PREFIX. The Jinja template of microsoft/rStar differs in both for later turns of the model, because the rollout
# loop of the release renders each tool response by itself and never renders a turn of the model again.


def render_segments(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    control_tokens: Sequence[str] = (),
) -> list[tuple[str, bool]]:
    """Return the conversation as (text, generated by the model) pieces; joined they are the text of a rollout.

    The pieces of the model are everything in an assistant turn after `<reason>`, including END_OF_TURN. What follows the
    last assistant turn is left out. messages: as in `template.render_segments`; without a system message,
    `SYSTEM_PROMPT`. control_tokens: neutralised in all messages that the model does not write.
    """
    has_system = bool(messages) and messages[0]["role"] == "system"
    system = messages[0].get("content") or "" if has_system else SYSTEM_PROMPT
    pieces: list[tuple[str, bool]] = []
    context = f"<|im_start|>system\n{neutralise(system, control_tokens)}{render_tools(tools)}{END_OF_TURN}"
    turns = list(messages[has_system:])
    for i, message in enumerate(turns):
        role, content = message["role"], neutralise(message.get("content") or "", control_tokens)
        if role == "assistant":
            pieces += [(f"{context}\n{GENERATION_PREFIX}", False), (assistant_text(message) + END_OF_TURN, True)]
            context = ""
        elif role == "tool":
            if i == 0 or turns[i - 1]["role"] != "tool":
                context += "\n<|im_start|>user" if context else "<|im_start|>user"
            context += f"\n<tool_response>\n{content}\n</tool_response>"
            if i + 1 == len(turns) or turns[i + 1]["role"] != "tool":
                context += END_OF_TURN
        else:
            context += f"\n<|im_start|>{role}\n{QUESTION_PREFIX if role == 'user' else ''}{content}{END_OF_TURN}"
    return pieces


CHAT_TEMPLATE = (
    "{%- set own_system = messages and messages[0].role == 'system' -%}\n"
    "{{- '<|im_start|>system\\n' -}}\n"
    "{{- (messages[0].content or '') if own_system else " + json.dumps(SYSTEM_PROMPT) + " -}}\n"
    "{%- if tools -%}\n"
    "{{- " + json.dumps(TOOLS_BEGIN) + " -}}\n"
    "{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}\n"
    "{{- " + json.dumps(TOOLS_END) + " -}}\n"
    "{%- endif -%}\n"
    "{{- '<|im_end|>' -}}\n"
    "{%- for message in messages -%}\n"
    "{%- set content = message.content or '' -%}\n"
    "{%- if message.role == 'assistant' -%}\n"
    "{{- '\\n<|im_start|>assistant\\n' + ('' if content.startswith('<reason>') else '<reason>') + content -}}\n"
    + TOOL_CALLS_JINJA
    + "{{- '<|im_end|>' -}}\n"
    "{%- elif message.role == 'tool' -%}\n"
    "{%- if loop.first or loop.previtem.role != 'tool' -%}\n"
    "{{- ('' if loop.previtem and loop.previtem.role == 'assistant' else '\\n') + '<|im_start|>user' -}}\n"
    "{%- endif -%}\n"
    "{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}\n"
    "{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>' -}}{%- endif -%}\n"
    "{%- elif message.role != 'system' or not loop.first -%}\n"
    "{{- '\\n<|im_start|>' + message.role + '\\n' -}}\n"
    "{{- (" + json.dumps(QUESTION_PREFIX) + " if message.role == 'user' else '') + content + '<|im_end|>' -}}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '\\n<|im_start|>assistant\\n<reason>' -}}{%- endif -%}"
)


# --- the format ------------------------------------------------------------------------------------------------------

_TOOLS = {"python": CARD_TOOL, "python_released": PYTHON_TOOL, "jupyter": JUPYTER_TOOL}
_TOOLS |= {tool["function"]["name"]: tool for tool in _TOOLS.values()}


class ReleasedRenderer(Renderer):
    """The format of the released model."""

    name = "released"
    for_environments = False
    rejects_extra_calls = False
    python_tool = "python_released"
    system_prompt = SYSTEM_PROMPT
    answer_request = ANSWER_REQUEST
    code_tools = _TOOLS

    def prompt(self, question: str, schemas: Sequence[dict[str, Any]]) -> str:
        system = SYSTEM_PROMPT if self.style.system is None else self.style.system
        return f"<|im_start|>system\n{system}{render_tools(schemas)}{END_OF_TURN}{self.next_question(question)}"

    def continuation(
        self, results: Sequence[str], user_text: str | None = None, *, names: Sequence[str] = (), ended: str = ""
    ) -> str:
        """Return the text that follows the end-of-turn token directly: the rollout loop of the release adds no newline there."""
        if user_text is not None:
            raise UserError("prompt_format released: environments cannot speak; choose paper or model")
        plain = [neutralise(text, self.control_tokens) for text in results]
        responses = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in plain)
        return f"<|im_start|>user{responses}{END_OF_TURN}\n{GENERATION_PREFIX}"

    def next_question(self, question: str, *, ended: str = "") -> str:
        plain = neutralise(question, self.control_tokens)
        return f"\n<|im_start|>user\n{QUESTION_PREFIX}{plain}{END_OF_TURN}\n{GENERATION_PREFIX}"

    @classmethod
    def result_text(cls, result: _TimedResult) -> str:
        """Return the text of a sandbox result as the release writes it, execution time included.

        The reason of a failure is empty for errors of the program: the release's judge names only failures of its own. The
        text of stderr is the traceback of this sandbox; the release prints the error type, line and source line.
        """
        stdout = result.stdout + (f"{result.value}\n" if result.value is not None else "")
        if result.outcome is Outcome.TIMEOUT:
            stdout += _TIMEOUT_LINE
        stdout, stderr = stdout[:_MAX_STREAM_CHARS], result.stderr[:_MAX_STREAM_CHARS]
        if result.outcome is Outcome.OK:
            lines = ["Tool call success"]
        else:
            lines = ["Tool call failure", f"reason: {_REASONS.get(result.outcome, '')}"]
        if stdout:
            lines.append(f"stdout: {stdout}")
        if stderr:
            lines.append(f"stderr: {stderr}")
        return "\n".join([*lines, f"execution time: {result.duration_s:.2f}s"])

    @classmethod
    def malformed_call_text(cls, call: ToolCall) -> str:
        found = call.error or ""  # of calls that are valid JSON
        try:
            decoded = json.loads(call.raw)
            _ = decoded["name"], decoded["arguments"]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            found = str(error)
        return f"Failed to decode tool call: {found}"

    @classmethod
    def unknown_tool_text(cls, name: str, tools: Sequence[str]) -> str:
        return f"Error when executing tool: {KeyError(name)}"

    @classmethod
    def invalid_arguments_text(cls, problem: str) -> str:
        return f"Error when executing tool: {problem}"

    @classmethod
    def arguments(cls, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the release passes them: missing ones are empty, unknown ones are left out."""
        parameters = schema["function"]["parameters"]
        known = {name: value for name, value in arguments.items() if name in parameters["properties"]}
        return {name: "" for name in parameters.get("required", [])} | known

    @classmethod
    def truncate(cls, text: str, max_chars: int, side: TruncateSide) -> str:
        """Return `text` cut to about `max_chars` characters. Side `left` keeps the start and `right` the end, as in the verl
        that the release uses; verl swapped the two meanings later (verl#6313)."""
        if len(text) <= max_chars:
            return text
        if side == "left":
            return text[:max_chars] + "...(truncated)"
        if side == "right":
            return "(truncated)..." + text[len(text) - max_chars :]
        half = max_chars // 2
        return text[:half] + "...(truncated)..." + text[len(text) - half :]

    @classmethod
    def sft_question(cls, question: str) -> str:
        return question  # `segments` adds QUESTION_PREFIX

    @classmethod
    def chat_template(cls, control_tokens: Sequence[str]) -> str:
        return CHAT_TEMPLATE

    @classmethod
    def segments(
        cls, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]], control_tokens: Sequence[str] = ()
    ) -> list[tuple[str, bool]]:
        return render_segments(messages, tools=tools, control_tokens=control_tokens)
