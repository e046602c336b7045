"""Conversion between text and token ids for one tokenizer, tool set and prompt style."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rstar_lab.rl.methods.user_functions import user_chat_template
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.renderers.formats import make_renderer
from rstar_lab.rl.renderers.paper import control_tokens, neutralise
from rstar_lab.rl.tools.base import Tool
from rstar_lab.tool_calls import ToolCall


class Codec:
    """Encodes prompts and tool responses, decodes what the model generated, and finds its tool calls.

    renderer: the renderer of the style's prompt format. Raises ValueError if the tokenizer does not have the token that
    ends a turn, and UserError if its chat template cannot be used.
    """

    def __init__(self, tokenizer: Any, tools: Mapping[str, Tool], style: PromptStyle = PromptStyle()):
        self.tokenizer, self.style = tokenizer, style
        self.schemas = [tool.schema for tool in tools.values()]
        self.control_tokens = control_tokens(tokenizer)
        self._control_token = re.compile("|".join(map(re.escape, self.control_tokens)) or r"(?!)")
        render = user_chat_template(style.chat_template) if style.chat_template else None
        self.renderer = make_renderer(style, self.control_tokens, tokenizer, render)
        self.end_id = tokenizer.convert_tokens_to_ids(self.renderer.end)
        if self.end_id is None or self.end_id == tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer does not have the token {self.renderer.end}, which ends a turn")
        end_of_text = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_token_ids = tuple(dict.fromkeys([self.end_id, *end_of_text, *self.renderer.stop_tokens()]))
        self._prompt = lru_cache(1024)(  # the rollouts of a group share their prompt
            lambda question: tuple(self.encode(self.renderer.prompt(question, self.schemas)))
        )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. A lone surrogate, which tokenizers reject, is encoded as `?`."""
        return self.tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """Return the text of a turn, without the tokens that end it."""
        while ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def calls(self, text: str) -> list[ToolCall]:
        """Return the tool calls of a turn, in order. A call that cannot be parsed has an error."""
        return self.renderer.calls(text, self.schemas)

    def has_misplaced_control_token(self, text: str) -> bool:
        """Return whether the model wrote a misplaced control token.

        A turn may contain control tokens only in the tags and arguments of its tool calls, and, in the format `model`,
        in one pair of `<think>` tags at the start. text: the turn without the tokens that end it.
        """
        if not self._control_token.search(text):
            return False
        return self._control_token.search(self.renderer.text_outside_calls(text)) is not None

    def prompt_ids(self, question: str) -> list[int]:
        """Return the ids of the first prompt, up to the start of generation."""
        return list(self._prompt(question))

    def tool_response_ids(
        self,
        texts: Sequence[str],
        names: Sequence[str] = (),
        last_id: int | None = None,
        observation: str | None = None,
    ) -> list[int]:
        """Return the ids between two turns: the tool responses, in order, a text of the environment, and the start of the next turn.

        names: names of the called tools. last_id: the last token of the turn. observation: text of the environment.
        """
        return self.encode(self.renderer.continuation(texts, observation, names=names, ended=self._token(last_id)))

    def next_question_ids(self, question: str, last_id: int | None = None) -> list[int]:
        """Return the ids that follow the end of a conversation when the user asks again."""
        return self.encode(self.renderer.next_question(question, ended=self._token(last_id)))

    def output_spans(self, ids: list[int], texts: Sequence[str], start: int) -> tuple[tuple[int, int], ...]:
        """Return the parts [start, end) of a response that hold these texts, in tokens, without the template around them.

        A token that also contains text of the template is left out, and so is a text that the template has changed.

        Args:
            ids: tokens between two turns of the model.
            texts: texts of tools and of the environment, in the order in which the template renders them.
            start: index of the first of these tokens in the response.
        """
        rendered = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        encoded = self.tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True)
        # A text with lone surrogates, or a tokenizer without a unique encoding.
        if list(encoded["input_ids"]) != list(ids):
            return ()
        spans: list[tuple[int, int]] = []
        position = 0
        for text in texts:
            shown = neutralise(text, self.control_tokens).strip()
            begin = rendered.find(shown, position) if shown else -1
            if begin < 0:
                continue
            position = begin + len(shown)
            inside = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if begin <= a < b <= position]
            if inside:
                spans.append((start + inside[0], start + inside[-1] + 1))
        return tuple(spans)

    def _token(self, token_id: int | None) -> str:
        """Return the text of a token that ends a turn, else an empty string."""
        return self.tokenizer.decode([token_id]) if token_id in self.stop_token_ids else ""
