"""Log-probs from logits under verl without flash-attn: values, gradients and number of kernels."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from verl.utils import torch_functional

from rstar_lab.rl.verl import attention, hooks  # noqa: F401 (hooks replaces verl's function)


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def kernels(tokens: int) -> int:
    logits = torch.randn(tokens, 32, requires_grad=True)
    labels = torch.randint(0, 32, (tokens,))
    with Counter() as counter:
        torch_functional.logprobs_from_logits(logits, labels).sum().backward()
    return counter.count


@pytest.mark.parametrize("large", [attention.LARGE, 0])
def test_the_number_of_kernels_does_not_grow_with_the_tokens(monkeypatch, large):
    monkeypatch.setattr(attention, "LARGE", large)
    assert kernels(4096) == kernels(256) <= 200


@pytest.mark.parametrize("shape", [(37,), (3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("large", [attention.LARGE, 0])
def test_values_and_gradients_equal_the_log_softmax(monkeypatch, shape, dtype, large):
    monkeypatch.setattr(attention, "LARGE", large)
    logits = (3 * torch.randn(*shape, 50)).to(dtype).requires_grad_()
    labels, weights = torch.randint(0, 50, shape), torch.randn(shape)
    found = torch_functional.logprobs_from_logits(logits, labels)
    expected = logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(gradient, wanted, atol=1e-6 if dtype == torch.float32 else 1e-2, rtol=1e-4)
