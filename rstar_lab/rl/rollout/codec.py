"""Conversion between text and token ids for one tokenizer, tool set and system prompt."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rstar_lab.rl.chat_format.formats import PromptFormat, render_observation, render_prompt, render_tool_results
from rstar_lab.rl.chat_format.template import END_OF_TURN, control_tokens
from rstar_lab.rl.tools.base import Tool


class Codec:
    """Encodes prompts and tool responses, decodes what the model generated.

    Raises ValueError if the tokenizer does not have the token that ends a turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Mapping[str, Tool],
        system: str | None = None,
        prompt_format: PromptFormat = "paper",
    ):
        self.tokenizer, self.system, self.prompt_format = tokenizer, system, prompt_format
        self.schemas = [tool.schema for tool in tools.values()]
        self.control_tokens = control_tokens(tokenizer)
        self.end_id = tokenizer.convert_tokens_to_ids(END_OF_TURN)
        if self.end_id is None or self.end_id == tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer does not have the token {END_OF_TURN}, which ends a turn")
        end_of_text = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_token_ids = tuple(dict.fromkeys([self.end_id, *end_of_text]))
        self._prompt = lru_cache(1024)(self._encode_prompt)  # the rollouts of a group share their prompt

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. A lone surrogate, which tokenizers reject, is encoded as `?`."""
        return self.tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """Return the text of a turn, without the tokens that end it."""
        while ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def prompt_ids(self, question: str) -> list[int]:
        return list(self._prompt(question))

    def _encode_prompt(self, question: str) -> tuple[int, ...]:
        prompt = render_prompt(
            question, self.schemas, self.prompt_format, system=self.system, control_tokens=self.control_tokens
        )
        return tuple(self.encode(prompt))

    def tool_response_ids(self, texts: list[str]) -> list[int]:
        """Return the ids that follow a turn with calls: the tool responses, in order, and the start of the next turn."""
        return self.encode(render_tool_results(texts, self.prompt_format, control_tokens=self.control_tokens))

    def observation_ids(self, text: str, tool_texts: list[str]) -> list[int]:
        """Return the ids that follow a turn which an environment answers: tool responses, the text, the next turn's start."""
        return self.encode(render_observation(text, tool_texts, control_tokens=self.control_tokens))
