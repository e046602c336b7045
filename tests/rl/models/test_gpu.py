"""The kernels of the trainer for GPUs, on a CPU: equal values and gradients, and activations in bf16."""

import copy

import pytest
import torch
from helpers.architectures import tiny_architecture
from helpers.trajectories import BATCH

from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.models import gpu
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.training import log_probs as log_probs_module
from rstar_lab.rl.training.update import Learner, make_optimizer


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


def test_the_fused_norm_equals_that_of_the_model(monkeypatch):
    model = tiny_architecture("Qwen3")
    norm, x = copy.deepcopy(model.model.norm), torch.randn(5, 32).bfloat16()
    gpu.use_bf16_stream(model)
    gpu.use_bf16_stream(model)  # again: no effect
    assert type(model.model.norm).__name__ == "FusedQwen3RMSNorm"
    assert torch.equal(model.model.norm(x.float()), norm(x.float())), "outside of autocast nothing changes"
    with torch.autocast("cpu", torch.bfloat16):
        found = model.model.norm(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), norm(x).float(), atol=2e-2, rtol=2e-2)
    assert type(copy.deepcopy(model).model.norm) is type(model.model.norm)


def test_the_optimizer_is_fused_on_gpus_only(monkeypatch):
    model = tiny_architecture("Qwen3")
    assert not make_optimizer(model, RlSection()).defaults["fused"]
    monkeypatch.setattr(gpu, "is_gpu", lambda device: True)
    assert make_optimizer(model, RlSection()).defaults["fused"]


def test_an_update_with_the_kernels_for_gpus_changes_the_weights_alike(monkeypatch):
    rl = RlSection(precision="fp32", lr=1e-3, gradient_checkpointing=True)
    weights = []
    for is_gpu in (False, True):
        monkeypatch.setattr(gpu, "is_gpu", lambda device, is_gpu=is_gpu: is_gpu)
        model = tiny_architecture("Qwen3")
        learner = Learner(model)
        learner.begin_stage(rl, reset=True, reference=None)
        learner.update(Selection.of(BATCH, [1.0, -1.0] * 3), rl, lr_scale=1.0, seed=0)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights, atol=1e-3, rtol=1e-2)
