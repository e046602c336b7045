"""Log-probs from logits under verl without flash-attn: values and gradients."""

import pytest
import torch
from verl.utils import torch_functional

from rstar_lab.rl.verl import attention, hooks


@pytest.mark.parametrize("shape", [(37,), (3, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("large", [False, True])
def test_values_and_gradients_equal_the_log_softmax(monkeypatch, shape, dtype, large):
    assert hooks, "the import replaces verl's function"
    if large:
        monkeypatch.setattr(attention, "LARGE", 0)
    logits = (3 * torch.randn(*shape, 50)).to(getattr(torch, dtype)).requires_grad_()
    labels, weights = torch.randint(0, 50, shape), torch.randn(shape)
    found = torch_functional.logprobs_from_logits(logits, labels)
    expected = logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(gradient, wanted, atol=1e-6 if dtype == "float32" else 1e-2, rtol=1e-4)
