"""Log-probs of labels from logits, in place of verl's fallback for machines without flash-attn, which loops over tokens.

verl removes padding, so its fallback starts about seven kernels per token of a micro-batch. Importing this module replaces it.
With flash-attn installed, verl does not call it.
"""

from typing import Any

import torch
from torch import Tensor
from verl.utils import torch_functional

# With more logits than LARGE, float32 copies exist for one of CHUNKS parts of the rows at a time.
LARGE, CHUNKS = 2**26, 16


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
