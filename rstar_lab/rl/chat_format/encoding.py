"""Encode conversations for SFT: token ids, and a loss mask over the model's own tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rstar_lab.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation: token ids, and a mask that is true where the model's own tokens are."""

    ids: list[int]
    mask: list[bool]


def encode(
    conversations: Sequence[Sequence[tuple[str, bool]]], tokenizer: "PreTrainedTokenizerBase", max_tokens: int
) -> tuple[list[Example], int]:
    """Conversations given as (text, is_the_model's_own) pieces, tokenized piece by piece as a rollout is.

    Returns (examples, how many were left out for being longer than max_tokens or without a token to learn from).
    Raises UserError where none is left.
    """
    texts = list(dict.fromkeys(text for conversation in conversations for text, _ in conversation))
    ids_of = dict(zip(texts, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True)) if texts else {}
    examples = []
    for conversation in conversations:
        ids = [token for text, _ in conversation for token in ids_of[text]]
        mask = [own for text, own in conversation for _ in ids_of[text]]
        if len(ids) <= max_tokens and any(mask[1:]):
            examples.append(Example(ids, [False, *mask[1:]]))
    if not examples:
        raise UserError(
            f"SFT: none of {len(conversations)} conversations has a turn of the model and at most"
            f" {max_tokens} tokens (max_tokens)"
        )
    return examples, len(conversations) - len(examples)
