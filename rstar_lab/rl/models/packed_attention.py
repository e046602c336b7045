"""Attention within each sequence of a packed row, without a mask of the whole row.

Position ids that restart at 0 separate the sequences. Each is computed by a call of torch's SDPA, which uses its flash kernel for
causal attention. transformers would build a mask of tokens x tokens, with which SDPA computes all pairs of the row.

A row can also hold the common beginning of several sequences once, followed by the rest of each.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "rstar_sequences"  # of the implementation in transformers
_CPU_KEYS = 1024  # up to this many keys, plain products in bf16 fit into memory and are faster than SDPA's CPU kernel
_layouts = WeakTensorKeyDictionary()  # the layers of a model share their position ids


def use_packed_attention(model: "PreTrainedModel", positions: Tensor, lengths: list[int], common: int = 0) -> None:
    """Compute packed rows of this model sequence by sequence from now on, instead of with SDPA and a mask.

    Args:
        model: a model without sliding windows.
        positions: position ids of a row, (1, tokens). The forward pass must get this tensor.
        lengths: lengths of its sequences.
        common: number of tokens at the start of the row that all sequences share. The lengths, which must be equal then, are
            without them.
    """
    _layouts[positions] = common, lengths
    use_products(model)


def use_products(model: "PreTrainedModel") -> None:
    """On a CPU, compute short rows in bf16 by matrix products from now on, and everything else with SDPA as before."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)  # returns None for rows without padding
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

    common, lengths = (0, None) if position_ids is None else _layouts.get(position_ids, (0, None))
    if attention_mask is not None and _plain(query, key):
        mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(~attention_mask, -torch.inf)
        return _products(query, key, value, mask[:, 0], options["scaling"]).transpose(1, 2), None
    if lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if common:
        return _attend_after(common, len(lengths), query, key, value, options["scaling"]), None
    return attend_within(module, query, key, value, lengths, **options), None


def _attend_after(common: int, count: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return causal attention of `count` sequences of equal length after their common beginning, (1, tokens, heads, head size)."""

    def rest(tensor: Tensor) -> Tensor:
        """(1, heads, tokens, head size) to (count, heads, tokens of a sequence, head size)."""
        return tensor[0, :, common:].unflatten(1, (count, -1)).transpose(0, 1)

    first_query, first_key, first_value = (tensor[:, :, :common] for tensor in (query, key, value))
    keys, values = (
        torch.cat([first.expand(count, -1, -1, -1), rest(tensor)], 2)
        for first, tensor in ((first_key, key), (first_value, value))
    )
    parts = _causal(first_query, first_key, first_value, scale), _causal(rest(query), keys, values, scale)
    return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])[None]


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return attention in which the queries are the last tokens of the keys, (rows, heads, tokens, head size)."""
    T, K = query.shape[2], key.shape[2]
    mask = pad(torch.full((T, T), -torch.inf, dtype=query.dtype, device=query.device).triu(1), (K - T, 0))
    if _plain(query, key):
        return _products(query, key, value, mask.expand(len(query), -1, -1), scale)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)


def _plain(query: Tensor, key: Tensor) -> bool:
    """Return whether attention is computed by matrix products, whose probabilities are kept for the backward pass."""
    return query.dtype == torch.bfloat16 and query.device.type == "cpu" and key.shape[2] <= _CPU_KEYS


def _products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return attention, (rows, heads, tokens, head size). mask: added to the scores, (rows, tokens, keys)."""
    rows, heads, T, _ = query.shape
    groups = key.shape[1]
    # The queries of all heads that share a key: (rows * groups, heads of a group * tokens, head size).
    shared = query.unflatten(1, (groups, -1)).flatten(2, 3).flatten(0, 1)
    added = mask.repeat(1, heads // groups, 1).repeat_interleave(groups, 0)
    scores = torch.baddbmm(added, shared, key.flatten(0, 1).transpose(1, 2), alpha=scale)
    out = scores.softmax(-1) @ value.flatten(0, 1)
    return out.unflatten(0, (rows, groups)).unflatten(2, (-1, T)).flatten(1, 2)
