"""Attention within each sequence of a packed row, without a mask of the whole row.

Position ids that restart at 0 separate the sequences. Each is computed by a call of torch's SDPA, which uses its flash kernel for
causal attention. transformers would build a mask of tokens x tokens, with which SDPA computes all pairs of the row.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "rstar_sequences"  # of the implementation in transformers
_lengths = WeakTensorKeyDictionary()  # the layers of a model share their position ids


def use_packed_attention(model: "PreTrainedModel", positions: Tensor, lengths: list[int]) -> None:
    """Compute packed rows of this model sequence by sequence from now on, instead of with SDPA and a mask.

    Args:
        model: a model without sliding windows.
        positions: position ids of a row, (1, tokens). The forward pass must get this tensor.
        lengths: lengths of its sequences.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)  # returns None for rows without padding
    _lengths[positions] = lengths
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)


def attend_within(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], **options: Any
) -> Tensor:
    """Return causal attention within each sequence, (1, tokens, heads, head size).

    Args:
        module: the attention layer.
        query, key, value: (1, heads, tokens, head size).
        lengths: lengths of the sequences in the row.
        options: of transformers' `sdpa_attention_forward`.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    parts = zip(*(tensor.split(list(lengths), dim=2) for tensor in (query, key, value)), strict=True)
    # Each part: (1, heads, tokens, head size) to (1, tokens, heads, head size).
    return torch.cat([sdpa_attention_forward(module, q, k, v, None, **options)[0] for q, k, v in parts], dim=1)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    lengths = None if position_ids is None else _lengths.get(position_ids)
    if lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return attend_within(module, query, key, value, lengths, **options), None
