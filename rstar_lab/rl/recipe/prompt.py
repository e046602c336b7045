"""The section `rl.prompt`: how prompts, tool schemas and tool responses are written."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rstar_lab.rl.section import ByType, Function, Section

PROGRAM_INSTRUCTION = (
    "Put the final program between <answer> and </answer>, in one block that starts with ```python (or ```cpp) and ends with "
    "```. It is run on hidden test cases."
)


class OpenPrompt(Section):
    """A prompt whose texts can be replaced."""

    system_prompt: str | None = None
    """System prompt; "" for none. Default: that of the prompt format."""
    question_wrapper: str | None = None
    """Template of the user message: a text that contains `{question}` and optionally `{answer_instruction}`. Default: the
    question, an empty line, the instruction."""
    answer_instruction: str | None = None
    """How the model is asked to write its answer. Default: `<answer>` tags with a box; with `format: model`, what `answer`
    reads; with `reward: tests`, a program in `<answer>` tags."""

    @field_validator("question_wrapper")
    @classmethod
    def _check_wrapper(cls, wrapper: str | None) -> str | None:
        if wrapper is not None and wrapper.count("{question}") != 1:
            raise ValueError("must contain {question} once")
        return wrapper


class PaperPrompt(OpenPrompt):
    """Prompts as the paper describes them."""

    format: Literal["paper"] = "paper"
    """Name of the format."""


class ReleasedPrompt(Section):
    """Prompts exactly as microsoft/rStar renders them, for the released rStar2-Agent-14B."""

    format: Literal["released"] = "released"
    """Name of the format."""


class ModelPrompt(OpenPrompt):
    """Prompts by the model's own chat template, with its own syntax of tool calls, for any chat model (docs/recipes.md). Not for
    SFT."""

    format: Literal["model"] = "model"
    """Name of the format."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as `enable_thinking: false`."""
    chat_template: Function | None = None
    """Your own `module:function` that renders conversations in place of the model's chat template (docs/extending.md)."""

    @model_validator(mode="after")
    def _check_template(self) -> "ModelPrompt":
        if self.template_options and self.chat_template:
            raise ValueError("template_options cannot be combined with chat_template, which has no variables")
        return self


AnyPrompt = Annotated[PaperPrompt | ReleasedPrompt | ModelPrompt, ByType("format")]
