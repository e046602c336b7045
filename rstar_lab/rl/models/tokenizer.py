"""A byte-level BPE tokenizer trained from scratch, for the tiny model.

Text is split at digits only, so that merges cross word boundaries: boilerplate becomes few tokens, and the tiny model
learns from short sequences. Each digit is a token, so that numbers can be copied.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rstar_lab.rl.chat_format import template as chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
_SPECIAL = list(chat.SPECIAL_TOKENS)


def repeated_texts() -> list[str]:
    """Return the long texts that every prompt contains: the system turn with tools, and the request for the answer format."""
    mark = "\0"
    pieces = re.split("|".join(map(re.escape, (mark, *_SPECIAL))), chat.render_prompt(mark))
    return [piece for piece in pieces if len(piece) > 40]


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, whole: Sequence[str] | None = None, max_length: int = 1024
) -> "PreTrainedTokenizerFast":
    """Train on `texts`; any string can be encoded and comes back unchanged.

    vocab_size counts the 256 bytes, the special tokens and `whole`; fewer are made where the texts hold too few pairs.
    whole: strings that become one token each (default: repeated_texts(), which would take a thousand merges).
    """
    from transformers import PreTrainedTokenizerFast

    whole = repeated_texts() if whole is None else list(whole)
    base = 256 + len(_SPECIAL)
    if vocab_size < base + len(whole):
        raise ValueError(
            f"vocab_size: {vocab_size} is below the {base} bytes and special tokens plus {len(whole)} whole strings"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(whole),
        special_tokens=_SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    boundary = re.compile("|".join(map(re.escape, [*whole, *_SPECIAL])))
    tokenizer.train_from_iterator((piece for text in texts for piece in boundary.split(text) if piece), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in whole])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=chat.END_OF_TURN,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat.CHAT_TEMPLATE
    return fast
