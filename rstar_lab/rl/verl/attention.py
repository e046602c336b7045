"""Attention for verl without the package flash-attn: torch's SDPA on each sequence of a packed micro-batch.

verl removes padding: a micro-batch is one row of concatenated sequences, whose position ids restart at 0. Sequences are computed
one by one, so SDPA uses its flash kernel for causal attention and no mask of the whole row exists. With sequence parallelism
(DeepSpeed-Ulysses, arXiv 2309.14509) each rank has a slice of the row with all heads; an all-to-all before the attention gives it
the whole row with a slice of the heads, and another one restores the slice of the row.

Importing this module registers the implementation in transformers.
"""

from typing import Any

import torch
import torch.distributed
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
)

from rstar_lab.rl.models.packed_attention import attend_within
from rstar_lab.rl.verl.config import PACKED_ATTENTION

_lengths: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # the layers of a model share their position ids


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention within each sequence of a packed row, of shape (1, tokens, heads, head size).

    query, key, value: (1, heads, tokens of this rank, head size). position_ids: (1, tokens of this rank).
    Raises ValueError for a padded batch, and for a sliding window shorter than a sequence.
    """
    if attention_mask is not None or position_ids is None or query.shape[0] != 1:
        raise ValueError(f"attention {PACKED_ATTENTION}: needs one packed row without a mask; set use_remove_padding")
    ranks = get_ulysses_sequence_parallel_world_size()
    if ranks > 1:
        repeats = max(ranks // key.shape[1], 1)  # every rank needs a key head
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        query, key, value = (gather_seq_scatter_heads(tensor, seq_dim=2, head_dim=1) for tensor in (query, key, value))
    lengths = _sequence_lengths(position_ids, ranks)
    if sliding_window is not None and max(lengths) > sliding_window:
        raise ValueError(
            f"attention {PACKED_ATTENTION}: no support for a sliding window of {sliding_window} tokens; install flash-attn"
        )
    output = attend_within(module, query, key, value, lengths, **options)
    if ranks > 1:
        output = gather_heads_scatter_seq(output, seq_dim=1, head_dim=2)
    return output, None


def _sequence_lengths(position_ids: torch.Tensor, ranks: int) -> list[int]:
    """Return the lengths of the packed sequences. A sequence starts at position 0, and may continue on the next rank."""
    if position_ids not in _lengths:
        row = position_ids
        if ranks > 1:
            parts = [torch.empty_like(row) for _ in range(ranks)]
            torch.distributed.all_gather(parts, row.contiguous(), group=get_ulysses_sequence_parallel_group())
            row = torch.cat(parts, dim=1)
        starts = torch.nonzero(row[0] == 0)[:, 0].tolist()
        _lengths[position_ids] = [end - start for start, end in zip(starts, [*starts[1:], row.shape[1]], strict=True)]
    return _lengths[position_ids]


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, flash_attention_mask)  # returns None for a batch without padding
