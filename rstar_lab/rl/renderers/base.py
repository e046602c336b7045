"""The protocol of prompt formats. A `Renderer` writes what surrounds the turns of a model and reads what is in them.

Formats are compared nowhere else: every other module asks the renderer of a format.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox.call import CallResult
from rstar_lab.tool_calls import Syntax, ToolCall, parse_tool_calls, text_outside_calls
from rstar_lab.verify import AnswerFormat, extract_answer

END_OF_TURN = "<|im_end|>"
PromptFormat = Literal["paper", "released", "model"]
PROMPT_FORMATS: tuple[PromptFormat, ...] = get_args(PromptFormat)
TruncateSide = Literal["left", "middle", "right"]
Texts = Sequence[str]
Messages = Sequence[Mapping[str, Any]]
Schemas = Sequence[dict[str, Any]]
_ENDINGS = {
    Outcome.TIMEOUT: "TimeoutError: the code ran past its time limit and was stopped.",
    Outcome.MEMORY: "MemoryError: the code went past its memory limit and was stopped.",
    Outcome.OUTPUT_LIMIT: "OutputLimitError: the code printed too much and was stopped.",
    Outcome.KILLED: "KilledError: the process ended before the code did.",
    Outcome.SANDBOX_ERROR: "The code could not be run. This is no fault of the code.",
    Outcome.QUEUE_TIMEOUT: "The code waited too long to be run. This is no fault of the code.",
}
# (messages, tools, whether to end with the start of the next turn) -> text of the conversation
Render = Callable[[list[dict[str, Any]], Sequence[dict[str, Any]], bool], str]


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """How prompts are written: the recipe's keys of prompts. None: the default of the format."""

    prompt_format: PromptFormat = "paper"
    system: str | None = None
    instruction: str | None = None
    answer: AnswerFormat = "tagged"
    template_options: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    truncate_side: TruncateSide = "middle"


def format_question(question: str, instruction: str) -> str:
    """Return the content of the user turn that asks `question`. instruction: how to write the answer; may be empty."""
    return question + f"\n\n{instruction}".rstrip()


class Renderer(ABC):
    """One prompt format. The texts of tools are those of the paper's format.

    The class attributes and class methods need no tokenizer; an instance renders for one style and tokenizer.

    Attributes:
        name: The format, as in the recipe.
        has_template: Whether the format has a chat template and SFT conversations of its own. If not, it is that of a model.
        rejects_extra_calls: Whether calls beyond the limit of a turn get an error; if not, they get no response.
        python_tool: Name of the default code tool in a recipe.
        system_prompt: Default system prompt.
        answer_request: Default answer instruction.
        code_tools: Function schemas of the code tools, by their names in a recipe and in a prompt.
        end: Text of the token that ends a turn.
        syntax: Syntax in which the model writes calls.
        thinks_first: Whether generation starts inside the reasoning.
    """

    name: ClassVar[PromptFormat]
    has_template: ClassVar[bool] = True
    rejects_extra_calls: ClassVar[bool] = True
    python_tool: ClassVar[str] = "python"
    system_prompt: ClassVar[str] = ""
    answer_request: ClassVar[str] = ""
    code_tools: ClassVar[Mapping[str, dict[str, Any]]] = {}
    end: str = END_OF_TURN
    syntax: Syntax = "hermes"
    thinks_first: bool = True

    def __init__(
        self,
        style: PromptStyle,
        control_tokens: Sequence[str] | None = None,
        tokenizer: Any = None,
        render: Render | None = None,
    ):
        """Create the renderer of a style.

        Args:
            style: How prompts are written.
            control_tokens: Strings that are neutralised in texts from outside; None: the default of the format.
            tokenizer: Tokenizer of the model; only the format `model` requires it.
            render: Function that replaces the chat template; only for the format `model`.
        """
        self.style, self.tokenizer = style, tokenizer
        self.control_tokens = self.default_control_tokens if control_tokens is None else tuple(control_tokens)

    default_control_tokens: ClassVar[tuple[str, ...]] = ()

    # --- what surrounds a turn

    @abstractmethod
    def prompt(self, question: str, schemas: Sequence[dict[str, Any]]) -> str:
        """Return the first prompt, up to the start of generation. schemas: function schemas of the tools."""

    @abstractmethod
    def continuation(self, results: Texts, user_text: str | None = None, *, names: Texts = (), ended: str = "") -> str:
        """Return the text that follows the token that ends a turn, up to the start of generation.

        Args:
            results: Tool responses, in the order of the calls.
            user_text: Text of an environment, or of the user of a chat, that follows them; None: none.
            names: Names of the called tools; only some models need them.
            ended: The token that ended the turn; in some families it is the first token of what follows.
        """

    def next_question(self, question: str, *, ended: str = "") -> str:
        """Return the text that follows the token that ends a turn when the user asks again, up to the start of generation."""
        return self.continuation([], self.question_turn(question), ended=ended)

    def question_turn(self, question: str) -> str:
        """Return the user turn that asks a question, with the answer instruction of the style."""
        style = self.style
        instruction = self.instruction(style.answer) if style.instruction is None else style.instruction
        return format_question(question, instruction)

    @classmethod
    def instruction(cls, answer: AnswerFormat) -> str:
        """Return the default answer instruction."""
        return cls.answer_request

    def stop_tokens(self) -> list[int]:
        """Return the ids of further tokens that end a turn."""
        return []

    # --- what a turn contains

    def calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """Return the calls of a turn, those that cannot be parsed with their error."""
        return parse_tool_calls(text, syntax=self.syntax, tools=schemas)

    def text_outside_calls(self, text: str) -> str:
        """Return what a turn contains besides its calls and the tags that its format has in this place."""
        return text_outside_calls(text, self.syntax)

    # --- tools

    @classmethod
    def code_tool(cls, name: str) -> dict[str, Any]:
        """Return the function schema of a code tool, by its name in a recipe or in a prompt. Raises UserError."""
        if name not in cls.code_tools:
            raise UserError(f"prompt_format {cls.name}: unknown tool {name!r}; choose from {', '.join(cls.code_tools)}")
        return cls.code_tools[name]

    @classmethod
    def result_text(cls, result: CallResult) -> str:
        """Return the text of a sandbox result for the model: the printed output, then the value of the last expression, the
        traceback, or the limit that was exceeded. No measured time is included: equal results give equal tokens."""
        if result.outcome is Outcome.OK:
            parts = [result.stdout, result.value or ""]
        else:
            parts = [result.stdout, _ENDINGS.get(result.outcome, result.stderr)]
        return "\n".join(part.rstrip("\n") for part in parts if part.strip("\n"))

    @classmethod
    def malformed_call_text(cls, call: ToolCall) -> str:
        """Return the response to a call that cannot be parsed."""
        return f"The tool call could not be parsed: {call.error}"

    @classmethod
    def unknown_tool_text(cls, name: str, tools: Sequence[str]) -> str:
        """Return the response to a call of a tool that does not exist."""
        return f"There is no tool '{name}'. Tools: {', '.join(tools)}."

    @classmethod
    def invalid_arguments_text(cls, problem: str) -> str:
        """Return the response to a call with wrong arguments."""
        return f"The arguments are not right: {problem}."

    @classmethod
    def arguments(cls, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that are passed to a tool."""
        return dict(arguments)

    @classmethod
    def truncate(cls, text: str, max_chars: int, side: TruncateSide) -> str:
        """Return a tool response, cut if it is longer than max_chars characters.

        This one leaves out the middle, because the start of an output and the end of a traceback matter most.
        """
        if len(text) <= max_chars:
            return text
        half = max_chars // 2
        omitted = len(text) - 2 * half
        return f"{text[:half]}\n[{omitted} characters left out]\n{text[len(text) - half :]}"

    def shortened(self, text: str, max_chars: int) -> str:
        """Return a tool response as the style shows it, see `truncate`."""
        return self.truncate(text, max_chars, self.style.truncate_side)

    # --- training data

    @classmethod
    def sft_question(cls, question: str) -> str:
        """Return the content of the user message that asks a question in SFT conversations."""
        return format_question(question, cls.instruction("tagged"))

    @classmethod
    def chat_template(cls, control_tokens: Sequence[str]) -> str:
        """Return the format as a Jinja template for a tokenizer. Raises UserError if `has_template` is False."""
        raise UserError(f"prompt_format {cls.name}: the chat template is that of the model")

    @classmethod
    def segments(cls, messages: Messages, tools: Schemas, control_tokens: Texts = ()) -> list[tuple[str, bool]]:
        """Return a conversation as (text, generated by the model) pieces. Raises UserError if `has_template` is False."""
        raise UserError(f"prompt_format {cls.name}: SFT supports only the formats paper and released")


def is_void_turn(text: str, calls: Sequence[ToolCall], answer_format: AnswerFormat = "tagged") -> bool:
    """Return whether an assistant turn has neither a well-formed tool call nor a final answer. calls: those in its text.

    Source: SimpleTIR (arXiv 2509.02479), section 3.3.
    """
    return extract_answer(text, answer_format) is None and all(call.error for call in calls)


def count_answers(text: str) -> int:
    """Return the number of `<answer>…</answer>` in the model's text; 0 if opening and closing tags do not match."""
    tags = re.findall(r"</?answer>", text)
    paired = len(tags) % 2 == 0 and all(tag == "<answer>" for tag in tags[::2]) and "<answer>" not in tags[1::2]
    return len(tags) // 2 if paired else 0
