"""Tests that Muon equals torch.optim.Muon. Its distribution over ranks is tested in test_sft.py."""

import torch

from rstar_lab.rl.training import muon
from rstar_lab.rl.training.muon import Muon

SHAPES = ((24, 24), (64, 24), (8, 24))


def trained(optimizer_class, **options):
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = optimizer_class(matrices, lr=0.02, weight_decay=0.1, **options)
    for _ in range(5):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        optimizer.step()
    return matrices


def test_bf16_updates_equal_torch_bit_for_bit(monkeypatch):
    monkeypatch.setattr(muon, "has_bf16", lambda device: True)
    for ours, theirs in zip(trained(Muon), trained(torch.optim.Muon), strict=True):
        assert torch.equal(ours, theirs)


def test_float32_updates_equal_torch_up_to_bf16_rounding(monkeypatch):
    monkeypatch.setattr(muon, "has_bf16", lambda device: False)
    for ours, theirs in zip(trained(Muon), trained(torch.optim.Muon), strict=True):
        assert torch.allclose(ours, theirs, atol=3e-3) and not torch.equal(ours, theirs)
