"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum, made orthogonal by Newton-Schulz.

Equal to `torch.optim.Muon`, but ranks share the work, matrices of one shape are one batch, and the precision is float32 where
the hardware has no bf16 (bf16 is twenty times slower on a CPU without AVX-512).
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rstar_lab.rl.models.model import has_bf16
from rstar_lab.rl.training.data_parallel import SINGLE_RANK, Ranks

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_MOMENTUM = 0.95
_TINY = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon for matrices. Each rank orthogonalises its share of the updates; the sum over the ranks has all of them."""

    def __init__(self, params: ParamsT, lr: float, weight_decay: float = 0.0, ranks: Ranks = SINGLE_RANK):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._ranks = ranks

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix. Gradients must be equal on all ranks."""
        assert closure is None
        for group in self.param_groups:
            matrices: list[Tensor] = group["params"]
            updates = [torch.zeros_like(matrix) for matrix in matrices]
            alike = defaultdict[torch.Size, dict[int, Tensor]](dict)  # own gradients with momentum, by shape
            for i, matrix in enumerate(matrices):
                assert matrix.grad is not None
                momentum = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - _MOMENTUM)
                if i % self._ranks.size == self._ranks.rank:
                    alike[matrix.shape][i] = matrix.grad.lerp(momentum, _MOMENTUM)
            for gradients in alike.values():
                for i, update in zip(gradients, orthogonal(torch.stack([*gradients.values()])), strict=True):
                    updates[i] = update
            self._ranks.sum(updates)
            for matrix, update in zip(matrices, updates, strict=True):
                rows, columns = matrix.shape
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, rows / columns)))


def orthogonal(matrices: Tensor) -> Tensor:
    """Return matrices (count, rows, columns) with singular values near 1 (Newton-Schulz iteration), float32."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x.to(torch.bfloat16 if has_bf16(matrices.device) else torch.float32, copy=True)
    x.div_(x.norm(dim=(1, 2), keepdim=True).clamp(min=_TINY))
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()
