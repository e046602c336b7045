"""The kernels of the trainer for GPUs, on a CPU: equal values and gradients, and activations in bf16."""

import copy
from collections import Counter

import pytest
import torch
from helpers.architectures import tiny_architecture
from helpers.trajectories import BATCH
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.models import gpu
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.training import log_probs as log_probs_module
from rstar_lab.rl.training.update import Learner, UpdateResult


def gradient_of(model, precision="fp32", **keys):
    """Return the log-probs, entropies and the gradient of their weighted sum."""
    rl = RlSection(precision=precision, temperature=0.7, **keys)
    learner = Learner(model)
    learner.begin_stage(rl, reset=True, reference=None)
    (micro,) = learner.micro_batches(BATCH, rl)
    log_probs, entropy = learner.forward(model, micro, rl)
    (log_probs * torch.arange(log_probs.numel()).view_as(log_probs) / 100).sum().backward()
    return log_probs.detach(), entropy, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", ["Qwen3", "Gemma2", "Granite", "Qwen2"])
@pytest.mark.parametrize("fp32_head", [False, True])
def test_token_statistics_and_gradients_equal_the_plain_ones(monkeypatch, name, fp32_head):
    model = tiny_architecture(name)
    for limit in ("CHUNK_LOGITS", "GPU_CHUNK_LOGITS"):
        monkeypatch.setattr(log_probs_module, limit, 259 * 7)
    plain = gradient_of(copy.deepcopy(model), fp32_head=fp32_head)
    monkeypatch.setattr(gpu, "is_gpu", lambda device: True)
    for found, expected in zip(gradient_of(model, fp32_head=fp32_head), plain, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["Qwen3", "Llama", "Gemma2", "Granite"])
def test_activations_between_layers_are_bf16_and_gradients_stay_close(monkeypatch, name):
    model = tiny_architecture(name)
    exact = gradient_of(copy.deepcopy(model))
    monkeypatch.setattr(gpu, "is_gpu", lambda device: True)
    seen = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    rough = gradient_of(model, precision="bf16")
    assert set(seen) <= {torch.bfloat16, torch.float32} and seen[-1] == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(rough[2], exact[2], dim=0) > 0.99
    assert (rough[0] - exact[0]).abs().mean() < 0.05
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("name", ["Qwen3", "Llama", "Qwen2", "Granite"])
def test_fused_norm_mlp_and_rotation_give_the_gradients_of_the_model(monkeypatch, name):
    model = tiny_architecture(name)
    rough = gradient_of(copy.deepcopy(model), precision="bf16")
    monkeypatch.setattr(gpu, "is_gpu", lambda device: True)
    counts = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counts[function.name().split("::")[1].split(".")[0]] += 1
            return function(*args, **(kwargs or {}))

    with Count():
        found = gradient_of(model, precision="bf16")
    layers = len(model.model.layers)
    assert counts["swiglu"] >= counts["swiglu_gradients"] == layers
    assert counts["rotate"] >= counts["rotate_back"] == 2 * layers
    assert not counts["silu"]
    torch.testing.assert_close(found[0], rough[0], atol=0.05, rtol=0.02)
    assert torch.nn.functional.cosine_similarity(found[2], rough[2], dim=0) > 0.995


def test_kernels_equal_the_formulas_and_their_gradients_are_exact():
    torch.manual_seed(0)
    gate, up = (torch.randn(3, 8, dtype=torch.float32, requires_grad=True) for _ in range(2))
    torch.testing.assert_close(gpu.swiglu(gate, up), torch.nn.functional.silu(gate) * up)
    x, cos, sin = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 8)
    torch.testing.assert_close(gpu.rotate(x, cos, sin), apply_rotary_pos_emb(x, x, cos[:, 0], sin[:, 0])[0])
    for function, inputs in ((gpu.swiglu, (gate, up)), (lambda x: gpu.rotate(x, cos, sin), (x,))):
        expected = torch.autograd.functional.jacobian(
            (lambda gate, up: torch.nn.functional.silu(gate) * up)
            if len(inputs) == 2
            else (lambda x: apply_rotary_pos_emb(x, x, cos[:, 0], sin[:, 0])[0]),
            inputs,
        )
        for one, other in zip(torch.autograd.functional.jacobian(function, inputs), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_an_update_reads_nothing_from_the_device_per_micro_batch():
    reads = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            reads[function.name()] += 1
            return function(*args, **(kwargs or {}))

    counts = []
    for tokens in (10_000, 1):  # one micro-batch, and one per rollout
        model = tiny_architecture("Qwen3")
        rl = RlSection(precision="fp32", micro_batch_tokens=tokens)
        learner = Learner(model)
        learner.begin_stage(rl, reset=True, reference=None)
        reads.clear()
        with Count(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(UpdateResult, "read", lambda self: None)  # once per mini-batch
            learner.update(Selection.of(BATCH, [1.0, -1.0] * 3), rl, lr_scale=1.0, seed=0)
        counts.append(reads["aten::_local_scalar_dense"])
    assert counts[1] - counts[0] == len(BATCH) - 1, "transformers reads the positions once per forward pass"
