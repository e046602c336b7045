"""Conversion between text and token ids for one tokenizer, tool set and prompt style."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rstar_lab.rl.recipe.functions import own_chat_template
from rstar_lab.rl.renderers import formats
from rstar_lab.rl.renderers.formats import PromptFormat, PromptStyle
from rstar_lab.rl.renderers.model import ModelTemplate
from rstar_lab.rl.renderers.paper import END_OF_TURN, control_tokens, format_question
from rstar_lab.rl.tools.base import Tool
from rstar_lab.tool_calls import ToolCall, parse_tool_calls, text_outside_calls


class Codec:
    """Encodes prompts and tool responses, decodes what the model generated, and finds its tool calls.

    model_template: the template of the prompt format `model`, else None. Raises ValueError if the tokenizer does not
    have the token that ends a turn, and UserError if its chat template cannot be used.
    """

    def __init__(self, tokenizer: Any, tools: Mapping[str, Tool], style: PromptStyle = PromptStyle()):
        self.tokenizer, self.style = tokenizer, style
        self.schemas = [tool.schema for tool in tools.values()]
        self.control_tokens = control_tokens(tokenizer)
        self._control_token = re.compile("|".join(map(re.escape, self.control_tokens)) or r"(?!)")
        self.model_template: ModelTemplate | None = None
        if style.prompt_format == "model":
            render = own_chat_template(style.chat_template) if style.chat_template else None
            self.model_template = ModelTemplate(tokenizer, self.control_tokens, style.template_options, render)
        self.end_id = tokenizer.convert_tokens_to_ids(self.model_template.end if self.model_template else END_OF_TURN)
        if self.end_id is None or self.end_id == tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer does not have the token {END_OF_TURN}, which ends a turn")
        others = self.model_template.stop_tokens() if self.model_template else []
        end_of_text = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_token_ids = tuple(dict.fromkeys([self.end_id, *end_of_text, *others]))
        self._prompt = lru_cache(1024)(self._encode_prompt)  # the rollouts of a group share their prompt

    @property
    def prompt_format(self) -> PromptFormat:
        return self.style.prompt_format

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
        if self.model_template is None:
            return parse_tool_calls(text)
        return self.model_template.calls(text, self.schemas)

    def has_misplaced_control_token(self, text: str) -> bool:
        """Return whether the model wrote a misplaced control token.

        A turn may contain control tokens only in the tags and arguments of its tool calls, and, in the format `model`,
        in one pair of `<think>` tags at the start. text: the turn without the tokens that end it.
        """
        if not self._control_token.search(text):
            return False
        template = self.model_template
        outside = text_outside_calls(text) if template is None else template.text_outside_calls(text)
        return self._control_token.search(outside) is not None

    def prompt_ids(self, question: str) -> list[int]:
        """Return the ids of the first prompt, up to the start of generation."""
        return list(self._prompt(question))

    def _encode_prompt(self, question: str) -> tuple[int, ...]:
        style = self.style
        wrapper, instruction = style.question_texts
        if self.model_template:
            user_turn = format_question(question, wrapper, instruction)
            return tuple(self.encode(self.model_template.prompt(user_turn, self.schemas, style.system or "")))
        prompt = formats.render_prompt(
            question,
            self.schemas,
            style.prompt_format,
            system=style.system,
            control_tokens=self.control_tokens,
            wrapper=wrapper,
            instruction=instruction,
        )
        return tuple(self.encode(prompt))

    def tool_response_ids(self, texts: Sequence[str]) -> list[int]:
        """Return the ids that follow a turn with calls: the tool responses, in order, and the start of the next turn."""
        if self.model_template:
            return self.encode(self.model_template.continuation(texts))
        return self.encode(formats.render_tool_results(texts, self.prompt_format, control_tokens=self.control_tokens))

    def observation_ids(self, text: str, tool_texts: Sequence[str]) -> list[int]:
        """Return the ids between two turns with a text of the environment: tool responses, text, and start of the next turn."""
        if self.model_template:
            return self.encode(self.model_template.continuation(tool_texts, text))
        return self.encode(formats.render_observation(text, tool_texts, control_tokens=self.control_tokens))

    def next_question_ids(self, question: str) -> list[int]:
        """Return the ids that follow the end of a conversation when the user asks again."""
        wrapper, instruction = self.style.question_texts
        if self.model_template:
            user_turn = format_question(question, wrapper, instruction)
            return self.encode(self.model_template.continuation([], user_turn))
        text = formats.render_next_question(
            question, self.prompt_format, control_tokens=self.control_tokens, wrapper=wrapper, instruction=instruction
        )
        return self.encode(text)
