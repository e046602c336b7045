"""Families whose turns do not end with one token of their own: GLM, Gemma 4 and gpt-oss.

Their prompts are those of the model's chat template. The text after a turn is written here, because it depends on the token
that ended the turn (the first token of what follows, for GLM and Gemma 4) and on the names of the called tools.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from rstar_lab.common.errors import UserError
from rstar_lab.rl.renderers.base import PromptStyle, Render, Texts
from rstar_lab.rl.renderers.model import ModelRenderer
from rstar_lab.tool_calls import Syntax
from rstar_lab.tool_calls.harmony import messages, parse_harmony


class FamilyRenderer(ModelRenderer):
    """A model whose chat template renders system messages, function schemas and calls in a known syntax.

    Attributes:
        ends: Tokens that end a turn; the first stands for a turn without such a token.
    """

    family_syntax: ClassVar[Syntax]
    ends: ClassVar[tuple[str, ...]]

    def _probe(self) -> None:
        self.takes_system = self.uses_tools = self.calls_needed = True
        self.end, self.syntax = self.ends[0], self.family_syntax
        known = self.tokenizer.get_vocab()
        if missing := [token for token in self.ends if token not in known]:
            raise UserError(
                f"{self.source} belongs to a tokenizer with {missing[0]}, which this tokenizer does not have"
            )

    def stop_tokens(self) -> list[int]:
        return [*self.tokenizer.convert_tokens_to_ids(list(self.ends)), *super().stop_tokens()]


def _with_names(results: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name of the called tool, result)."""
    return zip([*names, *["unknown"] * (len(results) - len(names))], results, strict=False)


class GlmRenderer(FamilyRenderer):
    """GLM 4.5 and later. A turn ends with the role token of what follows: `<|observation|>` or `<|user|>`."""

    family_syntax = "glm"
    ends = ("<|user|>", "<|observation|>", "<|endoftext|>")

    def continuation(self, results: Texts, user_text: str | None = None, *, names: Texts = (), ended: str = "") -> str:
        messages = [{"role": "tool", "content": self._plain(text)} for text in results]
        if user_text is not None:
            messages.append({"role": "user", "content": self._plain(user_text)})
        before = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
        first, whole = self._render(before), self._render([*before, *messages], generate=True)
        return whole[len(first.rstrip("\n")) :].lstrip("\n").removeprefix(ended or "\0")


class Gemma4Renderer(FamilyRenderer):
    """Gemma 4. After a call, the model writes `<|tool_response>`, and the turn goes on after the responses."""

    family_syntax = "gemma4"
    ends = ("<turn|>", "<|tool_response>")

    def _probe(self) -> None:
        super()._probe()
        self.thinks_after_response = bool(self.options.get("enable_thinking"))

    def continuation(self, results: Texts, user_text: str | None = None, *, names: Texts = (), ended: str = "") -> str:
        blocks = [
            f'<|tool_response>response:{name}{{value:<|"|>{self._plain(text)}<|"|>}}<tool_response|>'
            for name, text in _with_names(results, names)
        ]
        text = "".join(blocks)
        if results and ended == "<|tool_response>":
            text = text.removeprefix(ended)
        elif results:
            text = f"\n<|turn>model\n{text}"
        if user_text is not None:
            turn = self._render([{"role": "user", "content": self._plain(user_text)}], generate=True)
            return (f"{text}<turn|>" if results else text) + "\n" + turn[turn.index("<|turn>user") :]
        return text + ("<|channel>thought\n" if self.thinks_after_response else "")

    def text_outside_calls(self, text: str) -> str:
        outside = super().text_outside_calls(text)
        return outside.lstrip().removeprefix("<|channel>thought").replace("<channel|>", "", 1)


class GptOssRenderer(FamilyRenderer):
    """gpt-oss. A turn is a sequence of Harmony messages; `<|call|>` ends a turn with a call, `<|return|>` one with an answer."""

    family_syntax = "harmony"
    ends = ("<|return|>", "<|call|>")

    def continuation(self, results: Texts, user_text: str | None = None, *, names: Texts = (), ended: str = "") -> str:
        start = "<|start|>assistant"
        blocks = [
            f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"
            f"{json.dumps(self._plain(text), ensure_ascii=False)}<|end|>"
            for name, text in _with_names(results, names)
        ]
        user = [] if user_text is None else [f"<|start|>user<|message|>{self._plain(user_text)}<|end|>"]
        return "".join([*blocks, *user, start])

    def text_outside_calls(self, text: str) -> str:
        calls = {call.start for call in parse_harmony(text, {})}
        contents = [text[m.body : m.body_end] for m in messages(text) if m.start not in calls]
        return "\n".join(contents)


# What a chat template of the family contains -> its renderer
_FAMILIES: dict[str, type[FamilyRenderer]] = {
    "<|tool_call>call:": Gemma4Renderer,
    "<arg_key>": GlmRenderer,
    "<|channel|>commentary": GptOssRenderer,
}
# Families that are not supported; without this table, a template that renders no schemas would get tools as text.
_UNSUPPORTED = {
    "<｜tool▁calls▁begin｜>": "DeepSeek V3",
    "<｜DSML｜": "DeepSeek V3.2 and later",
    "<|tool_calls_section_begin|>": "Kimi K2",
    "[TOOL_CALLS]": "Mistral",
    "<|python_start|>": "Llama 4",
    "<minimax:tool_call>": "MiniMax",
    "<|tool_call_start|>": "LFM2",
    "<|START_ACTION|>": "Cohere",
    "<TOOLCALL>": "Nemotron Nano 2",
    "<seed:tool_call>": "Seed-OSS",
}


def model_renderer(
    style: PromptStyle, control_tokens: Sequence[str] | None, tokenizer: Any, render: Render | None = None
) -> ModelRenderer:
    """Return the renderer of a model by its chat template.

    Raises:
        UserError: The template cannot be used, or its family is not supported.
    """
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if render is None:
        for mark, family in _FAMILIES.items():
            if mark in template:
                return family(style, control_tokens, tokenizer)
        if name := next((name for mark, name in _UNSUPPORTED.items() if mark in template), None):
            raise UserError(
                f"prompt_format model: the chat template of {tokenizer.name_or_path} is that of {name}, whose tool calls are not "
                "supported; set rl.prompt.format=paper, or write rl.prompt.chat_template"
            )
    return ModelRenderer(style, control_tokens, tokenizer, render)
