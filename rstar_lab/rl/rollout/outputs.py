"""Finds the tokens of a response that are the text of a tool or of the environment."""

from collections.abc import Sequence

from rstar_lab.rl.renderers.paper import neutralise
from rstar_lab.rl.rollout.codec import Codec


def output_spans(codec: Codec, ids: list[int], texts: Sequence[str], start: int) -> tuple[tuple[int, int], ...]:
    """Return the parts [start, end) of a response that hold these texts, in tokens, without the template around them.

    A token that also contains text of the template is left out, and so is a text that the template has changed.

    Args:
        codec: the codec that encoded the texts.
        ids: tokens between two turns of the model.
        texts: texts of tools and of the environment, in the order in which the template renders them.
        start: index of the first of these tokens in the response.
    """
    rendered = codec.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    encoded = codec.tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True)
    if list(encoded["input_ids"]) != list(ids):  # a text with lone surrogates, or a tokenizer without a unique encoding
        return ()
    spans: list[tuple[int, int]] = []
    position = 0
    for text in texts:
        shown = neutralise(text, codec.control_tokens).strip()
        begin = rendered.find(shown, position) if shown else -1
        if begin < 0:
            continue
        position = begin + len(shown)
        inside = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if begin <= a < b <= position]
        if inside:
            spans.append((start + inside[0], start + inside[-1] + 1))
    return tuple(spans)
