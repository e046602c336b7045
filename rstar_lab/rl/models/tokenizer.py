"""A byte-level BPE tokenizer trained from scratch, for the tiny model.

Text is split at digits only, so merges can cross word boundaries. Fixed phrases become few tokens, and the sequences of
the tiny model are short. Each digit is a token, so that the model can copy numbers.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rstar_lab.rl.renderers import paper as chat
from rstar_lab.rl.renderers.formats import PromptFormat, render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
_SPECIAL = list(chat.SPECIAL_TOKENS)


def repeated_texts(prompt_format: PromptFormat = "paper") -> list[str]:
    """Return the long texts that every prompt contains: the system turn with tools, and the request for the answer format."""
    mark = "\0"
    prompt = render_prompt(mark, prompt_format=prompt_format)
    pieces = re.split("|".join(map(re.escape, (mark, *_SPECIAL))), prompt)
    return [piece for piece in pieces if len(piece) > 40]


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, single_tokens: Sequence[str] | None = None, max_length: int = 1024
) -> "PreTrainedTokenizerFast":
    """Train a tokenizer on `texts`. Encoding any string and decoding it returns the same string.

    vocab_size: number of tokens, including the 256 bytes, the special tokens and `single_tokens`. The vocabulary is
    smaller if the texts contain too few pairs to merge. single_tokens: strings that become one token each; default:
    repeated_texts(), which would need a thousand merges. Raises ValueError if vocab_size is too small.
    """
    from transformers import PreTrainedTokenizerFast

    single_tokens = repeated_texts() if single_tokens is None else list(single_tokens)
    base = 256 + len(_SPECIAL)
    if vocab_size < base + len(single_tokens):
        raise ValueError(
            f"vocab_size: {vocab_size} is below the {base} bytes and special tokens plus {len(single_tokens)} strings of single_tokens"
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
        vocab_size=vocab_size - len(single_tokens),
        special_tokens=_SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    boundary = re.compile("|".join(map(re.escape, [*single_tokens, *_SPECIAL])))
    tokenizer.train_from_iterator((piece for text in texts for piece in boundary.split(text) if piece), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in single_tokens])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=chat.END_OF_TURN,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat.CHAT_TEMPLATE
    return fast
