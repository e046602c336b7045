"""Faster training on a GPU in bf16: activations between the layers in bf16, and RMSNorm in one kernel.

Master weights are fp32, and autocast computes matrix products in bf16. Without this module, embeddings and norms return fp32, so
that the residual stream and its checkpoints take twice the memory and elementwise kernels twice the time.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Classes of transformers that compute weight * x / rms(x). Others, such as Gemma's (1 + weight), keep their own kernels.
_NORMS = {
    f"{name}RMSNorm"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Phi3", "Granite", "SmolLM3", "Olmo2")
}


def is_gpu(device: torch.device) -> bool:
    """Return whether kernels for GPUs are used on this device."""
    return device.type == "cuda"


def use_bf16_stream(model: "PreTrainedModel") -> None:
    """Keep activations in bf16 wherever autocast computes in bf16. Changes nothing outside of such a context."""
    embeddings = model.get_input_embeddings()
    if getattr(embeddings, "_bf16_stream", False):
        return
    embeddings._bf16_stream = True  # type: ignore[assignment]
    embeddings.register_forward_hook(_to_bf16)
    for module in model.modules():
        if type(module).__name__ in _NORMS:
            module.__class__ = _fused(type(module))  # type: ignore[arg-type]


def _in_bf16(tensor: Tensor) -> bool:
    device = tensor.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16


def _to_bf16(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    return output.to(torch.bfloat16) if _in_bf16(output) else output


@cache
def _fused(norm: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != torch.bfloat16 or not _in_bf16(hidden_states):
            return norm.forward(self, hidden_states)
        epsilon = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        with torch.autocast(hidden_states.device.type, enabled=False):  # autocast would compute and return fp32
            return rms_norm(hidden_states, list(self.weight.shape), self.weight.to(torch.bfloat16), epsilon)

    return type(f"Fused{norm.__name__}", (norm,), {"forward": forward})
