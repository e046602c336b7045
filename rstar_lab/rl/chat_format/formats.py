"""The prompt formats: `paper` (rStar2-Agent, section 2) and `released` (microsoft/rStar)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rstar_lab.errors import UserError
from rstar_lab.rl.chat_format import released, template

PromptFormat = Literal["paper", "released"]

_PAPER_TOOLS = {
    "python": template.CODE_TOOL,
    "python_released": template.RELEASED_TOOL,
    "jupyter": template.JUPYTER_TOOL,
    "execute_python_code_with_standard_io": template.CODE_TOOL,
    "python_code_with_standard_io": template.RELEASED_TOOL,
    "jupyter_code": template.JUPYTER_TOOL,
}
_RELEASED_TOOLS = {
    "python": released.PYTHON_TOOL,
    "python_released": released.PYTHON_TOOL,
    "jupyter": released.JUPYTER_TOOL,
    "python_code_with_standard_io": released.PYTHON_TOOL,
    "jupyter_code": released.JUPYTER_TOOL,
}


def code_tool_schema(name: str, prompt_format: PromptFormat) -> dict[str, Any]:
    """Return the function schema of a code tool, by its name in a recipe or its name in the prompt. Raises UserError."""
    tools = _RELEASED_TOOLS if _check(prompt_format) == "released" else _PAPER_TOOLS
    if name not in tools:
        raise UserError(f"prompt_format {prompt_format}: unknown tool {name!r}; choose from {', '.join(tools)}")
    return tools[name]


def render_prompt(
    question: str,
    tools: Sequence[str | Mapping[str, Any]] = ("python",),
    prompt_format: PromptFormat = "paper",
    *,
    system: str | None = None,
    control_tokens: Sequence[str] | None = None,
) -> str:
    """Return the text of the first prompt of a rollout, up to the start of generation.

    tools: names of code tools, or function schemas. system: system prompt; default: that of the format; "" with the
    paper's format: no system prompt. control_tokens: of the tokenizer, neutralised in the question; default: those of the
    paper's format, none in the released one. Raises UserError for an unknown tool or format.
    """
    schemas = [code_tool_schema(tool, prompt_format) if isinstance(tool, str) else dict(tool) for tool in tools]
    if _check(prompt_format) == "released":
        question = template.neutralise(question, control_tokens or ())
        return released.render_prompt(question, schemas, released.SYSTEM_PROMPT if system is None else system)
    return template.render_prompt(
        question,
        tools=schemas,
        system=template.SYSTEM_PROMPT if system is None else system,
        control_tokens=template.CONTROL_TOKENS if control_tokens is None else control_tokens,
    )


def render_next_question(
    question: str, prompt_format: PromptFormat = "paper", *, control_tokens: Sequence[str] | None = None
) -> str:
    """Return the text that follows the end-of-turn token when the user asks again, up to the start of generation.

    control_tokens: as in `render_prompt`. Raises UserError for an unknown format.
    """
    if _check(prompt_format) == "released":
        return released.render_next_question(template.neutralise(question, control_tokens or ()))
    pieces = template.render_segments(
        [{"role": "user", "content": template.format_question(question)}],
        add_generation_prompt=True,
        control_tokens=template.CONTROL_TOKENS if control_tokens is None else control_tokens,
    )
    return "\n" + "".join(text for text, _ in pieces)


def render_tool_results(
    results: Iterable[str],
    prompt_format: PromptFormat = "paper",
    *,
    control_tokens: Sequence[str] | None = None,
) -> str:
    """Return the text that follows the end-of-turn token of a turn with tool calls, up to the start of generation.

    results: the texts of the tool responses, in the order of the calls. control_tokens: as in `render_prompt`, neutralised
    in the results. Raises UserError for an unknown format.
    """
    if _check(prompt_format) == "released":
        return released.render_tool_results([template.neutralise(text, control_tokens or ()) for text in results])
    tokens = template.CONTROL_TOKENS if control_tokens is None else control_tokens
    return template.render_tool_responses(results, control_tokens=tokens)


def render_observation(text: str, results: Iterable[str] = (), *, control_tokens: Sequence[str] | None = None) -> str:
    """Return the text that follows the end-of-turn token when an environment speaks, up to the start of generation, in
    the paper's format.

    text: of the environment, a user message. results: the texts of the tool responses of the turn, which come before.
    control_tokens: as in `render_prompt`, neutralised in both.
    """
    messages = [*({"role": "tool", "content": result} for result in results), {"role": "user", "content": text}]
    tokens = template.CONTROL_TOKENS if control_tokens is None else control_tokens
    pieces = template.render_segments(messages, add_generation_prompt=True, control_tokens=tokens)
    return "\n" + "".join(piece for piece, _ in pieces)


def _check(prompt_format: str) -> str:
    if prompt_format not in ("paper", "released"):
        raise UserError(f"prompt_format {prompt_format!r}: choose from paper, released")
    return prompt_format
