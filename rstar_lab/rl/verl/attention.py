"""Attention and log-probs for verl without the package flash-attn.

verl removes padding: a micro-batch is one row of concatenated sequences, whose position ids restart at 0. Sequences are computed
one by one with torch's SDPA, which then uses its flash kernel for causal attention, and no mask of the whole row exists. With
sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509) each rank has a slice of the row with all heads; an all-to-all before the
attention gives it the whole row with a slice of the heads, and another one restores the slice of the row.

verl's fallback for log-probs loops over tokens, with about seven kernels per token of a micro-batch. Importing this module registers
the attention in transformers and replaces the fallback. With flash-attn installed, verl does not call it."""

from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from verl.utils import torch_functional
from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
)

from rstar_lab.rl.models.packed_attention import attend_within
from rstar_lab.rl.verl.config import PACKED_ATTENTION

_lengths: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # the layers of a model share their position ids
# With more logits than LARGE, float32 copies exist for one of CHUNKS parts of the rows at a time.
LARGE, CHUNKS = 2**26, 16


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


class _LogProbs(torch.autograd.Function):
    """log softmax(logits)[label] of each row. Saves the logits and one number per row, not the probabilities."""

    @staticmethod
    def forward(context: Any, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        chunks = CHUNKS if logits_NV.numel() > LARGE else 1
        parts = []
        for logits in logits_NV.chunk(chunks):
            parts.append(logits.to(_precise(logits)).logsumexp(-1))
        normaliser_N = torch.cat(parts)
        context.save_for_backward(logits_NV, labels_N, normaliser_N)
        return logits_NV.gather(-1, labels_N[:, None])[:, 0].to(normaliser_N.dtype) - normaliser_N

    @staticmethod
    def backward(context: Any, grad_N: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits_NV, labels_N, normaliser_N = context.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        chunks = CHUNKS if logits_NV.numel() > LARGE else 1
        columns = (logits_NV, labels_N[:, None], normaliser_N[:, None], grad_N[:, None], grad_NV)
        for logits, labels, normaliser, grad, out in zip(*(column.chunk(chunks) for column in columns), strict=True):
            probs = (logits.to(_precise(logits)) - normaliser).exp_().mul_(-grad)
            out.copy_(probs.scatter_add_(-1, labels, grad))
        return grad_NV, None


def _precise(logits: Tensor) -> torch.dtype:
    return logits.dtype if logits.dtype == torch.float64 else torch.float32


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probs of the labels, float32.

    Args:
        logits: (..., vocabulary), of any floating-point type.
        labels: token ids, (...).
    """
    return _LogProbs.apply(logits.flatten(0, -2), labels.flatten()).view(labels.shape)


torch_functional.logprobs_from_logits_v2 = logprobs_from_logits
