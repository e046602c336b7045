"""The prompt formats by name: `paper` (rStar2-Agent, section 2), `released` (microsoft/rStar) and `model`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.rl.renderers.base import PROMPT_FORMATS, PromptFormat, PromptStyle, Render, Renderer
from rstar_lab.rl.renderers.families import model_renderer
from rstar_lab.rl.renderers.model import ModelRenderer
from rstar_lab.rl.renderers.paper import PaperRenderer
from rstar_lab.rl.renderers.released import ReleasedRenderer

RENDERERS: dict[str, type[Renderer]] = {kind.name: kind for kind in (PaperRenderer, ReleasedRenderer, ModelRenderer)}


def renderer_type(prompt_format: str) -> type[Renderer]:
    """Return the renderer of a format. Raises UserError for an unknown format."""
    if prompt_format not in RENDERERS:
        raise UserError(f"prompt_format {prompt_format!r}: choose from {', '.join(PROMPT_FORMATS)}")
    return RENDERERS[prompt_format]


def make_renderer(
    style: PromptStyle, control_tokens: Sequence[str] | None = None, tokenizer: Any = None, render: Render | None = None
) -> Renderer:
    """Return the renderer of a style. The arguments are those of `Renderer`; the format `model` requires a tokenizer."""
    kind = renderer_type(style.prompt_format)
    if kind is ModelRenderer and tokenizer is not None:
        return model_renderer(style, control_tokens, tokenizer, render)
    return kind(style, control_tokens, tokenizer, render)


def render_prompt(
    question: str,
    tools: Sequence[str | Mapping[str, Any]] = ("python",),
    prompt_format: PromptFormat = "paper",
    *,
    system: str | None = None,
    control_tokens: Sequence[str] | None = None,
) -> str:
    """Return the text of the first prompt of a rollout, up to the start of generation, in the format paper or released.

    Args:
        question: The question.
        tools: Names of code tools, or function schemas.
        prompt_format: `paper` or `released`. The format `model` needs a tokenizer: see `ModelRenderer`.
        system: System prompt; None: the format's own; "": none (paper only).
        control_tokens: Strings to neutralise in the question; None: those of the paper's format, none in the released one.

    Raises:
        UserError: The tool or the format is unknown, or the format is `model`.
    """
    kind = renderer_type(prompt_format)
    schemas = [kind.code_tool(tool) if isinstance(tool, str) else dict(tool) for tool in tools]
    return kind(PromptStyle(prompt_format, system=system), control_tokens).prompt(question, schemas)


def render_tool_results(results: Iterable[str], prompt_format: PromptFormat = "paper") -> str:
    """Return the text that follows the end-of-turn token of a turn with tool calls, up to the start of generation.

    Args:
        results: Texts of the tool responses, in the order of the calls.
        prompt_format: `paper` or `released`.

    Raises:
        UserError: The format is unknown, or it is `model`.
    """
    return renderer_type(prompt_format)(PromptStyle(prompt_format)).continuation(list(results))
