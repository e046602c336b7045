"""The prompt formats: `paper` (rStar2-Agent, section 2), `released` (microsoft/rStar) and `model` (`model.py`)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rstar_lab.errors import UserError
from rstar_lab.rl.renderers import paper as template
from rstar_lab.rl.renderers import released
from rstar_lab.verify import AnswerFormat

PromptFormat = Literal["paper", "released", "model"]
PROMPT_FORMATS: tuple[PromptFormat, ...] = get_args(PromptFormat)
_INSTRUCTIONS: dict[AnswerFormat, str] = {
    "tagged": template.ANSWER_REQUEST,
    "boxed": "Put the final answer in \\boxed{}.",
    "last_number": "End with the final answer as a number.",
}


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """How prompts are written: the recipe keys `rl.prompt_format`, `system_prompt`, `question_wrapper`,
    `answer_instruction`, `answer`, `template_options` and `chat_template`. None: the default of the format."""

    prompt_format: PromptFormat = "paper"
    system: str | None = None
    wrapper: str | None = None
    instruction: str | None = None
    answer: AnswerFormat = "tagged"
    template_options: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None

    @property
    def question_texts(self) -> tuple[str, str]:
        """Return the wrapper of a question and the answer instruction."""
        default = _INSTRUCTIONS[self.answer] if self.prompt_format == "model" else template.ANSWER_REQUEST
        instruction = default if self.instruction is None else self.instruction
        return self.wrapper or template.QUESTION_WRAPPER, instruction


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
    tools = _RELEASED_TOOLS if prompt_format == "released" else _PAPER_TOOLS
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
    wrapper: str = template.QUESTION_WRAPPER,
    instruction: str = template.ANSWER_REQUEST,
) -> str:
    """Return the text of the first prompt of a rollout, up to the start of generation, in the format paper or released.
    For the format `model`, which needs a tokenizer, see `ModelTemplate`.

    tools: names of code tools, or function schemas. system: system prompt; default: the format's own; "" means no
    system prompt (paper format only). control_tokens: strings to neutralise in the question; default: those of the
    paper's format, none in the released one. wrapper, instruction: see `template.format_question`; paper only. Raises
    UserError for an unknown tool or format.
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
        wrapper=wrapper,
        instruction=instruction,
    )


def render_next_question(
    question: str,
    prompt_format: PromptFormat = "paper",
    *,
    control_tokens: Sequence[str] | None = None,
    wrapper: str = template.QUESTION_WRAPPER,
    instruction: str = template.ANSWER_REQUEST,
) -> str:
    """Return the text that follows the end-of-turn token when the user asks again, up to the start of generation.

    control_tokens, wrapper, instruction: as in `render_prompt`. Raises UserError for an unknown format.
    """
    if _check(prompt_format) == "released":
        return released.render_next_question(template.neutralise(question, control_tokens or ()))
    pieces = template.render_segments(
        [{"role": "user", "content": template.format_question(question, wrapper, instruction)}],
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

    text: the environment's text, rendered as a user message. results: the texts of the turn's tool responses, rendered
    before `text`. control_tokens: as in `render_prompt`, neutralised in both.
    """
    messages = [*({"role": "tool", "content": result} for result in results), {"role": "user", "content": text}]
    tokens = template.CONTROL_TOKENS if control_tokens is None else control_tokens
    pieces = template.render_segments(messages, add_generation_prompt=True, control_tokens=tokens)
    return "\n" + "".join(piece for piece, _ in pieces)


def _check(prompt_format: str) -> str:
    if prompt_format == "model":
        raise UserError("prompt_format model needs the tokenizer of the model: use ModelTemplate(tokenizer, ...)")
    if prompt_format not in PROMPT_FORMATS:
        raise UserError(f"prompt_format {prompt_format!r}: choose from {', '.join(PROMPT_FORMATS)}")
    return prompt_format
