"""Faster training on a GPU in bf16: fewer passes over activations, weights and gradients.

Master weights are fp32, and autocast computes matrix products in bf16. Without this module, embeddings and norms return fp32, so
that the residual stream and its checkpoints take twice the memory and elementwise kernels twice the time. RMSNorm, SwiGLU and
rotary embeddings run in one kernel each. Within `bf16_weights`, each weight is cast once, and its gradient is added without an
fp32 copy.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Prefixes of classes of transformers whose RMSNorm is weight * x / rms(x). Others, such as Gemma's (1 + weight), keep their kernels.
_NORMS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Phi3", "Granite", "SmolLM3", "Olmo2")
# Prefixes of those with an MLP of down(silu(gate(x)) * up(x)) and with rotary embeddings over all of the head.
_LLAMA_LIKE = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Granite", "SmolLM3")

_log = logging.getLogger(__name__)


def is_gpu(device: torch.device) -> bool:
    """Return whether kernels for GPUs are used on this device."""
    return device.type == "cuda"


def use_fast_layers(model: "PreTrainedModel") -> None:
    """Keep activations in bf16 wherever autocast computes in bf16, and compute RMSNorm with fewer passes over memory on a CPU."""
    embeddings = model.get_input_embeddings()
    if getattr(embeddings, "_bf16_stream", False):
        return
    embeddings._bf16_stream = True  # type: ignore[assignment]
    embeddings.register_forward_hook(_to_bf16)
    for module in model.modules():
        prefix, kind = _split(type(module).__name__)
        if type(module) is nn.Linear:
            module.__class__ = _Linear
        elif kind == "RMSNorm" and prefix in _NORMS:
            module.__class__ = _with_fused_norm(type(module))  # type: ignore[arg-type]
        elif kind == "MLP" and prefix in _LLAMA_LIKE and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation"):
            module.__class__ = _with_fused_swiglu(type(module))  # type: ignore[arg-type]
        elif kind == "Attention" and prefix in _LLAMA_LIKE:
            _fuse_rotary(sys.modules[type(module).__module__])


@contextmanager
def bf16_weights(model: nn.Module) -> Iterator[None]:
    """Keep a bf16 copy of the weights of linear layers until the end of the block, in which no weight may change.

    In the block, `backward` adds the gradients of the copies to `.grad` of the weights. Has no effect without `use_fast_layers`.
    """
    layers = [module for module in model.modules() if isinstance(module, _Linear)]
    for layer in layers:
        layer.keeps_copy = True
    try:
        yield
    finally:
        for layer in layers:
            layer.keeps_copy, layer.copies = False, None


def _split(name: str) -> tuple[str, str]:
    for kind in ("RMSNorm", "MLP", "Attention"):
        if name.endswith(kind):
            return name.removesuffix(kind), kind
    return name, ""


def _in_bf16(tensor: Tensor) -> bool:
    device = tensor.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16


def _to_bf16(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    return output.to(torch.bfloat16) if _in_bf16(output) else output


@cache
def _with_fused_norm(norm: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        epsilon = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        mixed = hidden_states.dtype == torch.bfloat16 and _in_bf16(hidden_states)
        if hidden_states.device.type == "cpu" and (mixed or hidden_states.dtype == self.weight.dtype == torch.float32):
            # Takes fewer passes over memory than the forward pass of transformers.
            wide = hidden_states.float()
            scale = (torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / wide.shape[-1] + epsilon).rsqrt()
            return (wide * scale * self.weight).to(hidden_states.dtype)
        if not mixed:
            return norm.forward(self, hidden_states)
        with torch.autocast(hidden_states.device.type, enabled=False):  # autocast would compute and return fp32
            return rms_norm(hidden_states, list(self.weight.shape), self.weight.to(torch.bfloat16), epsilon)

    return type(f"Fused{norm.__name__}", (norm,), {"forward": forward})


@cache
def _with_fused_swiglu(mlp: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not is_gpu(x.device) or not _in_bf16(x):
            return mlp.forward(self, x)
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))

    return type(f"Fused{mlp.__name__}", (mlp,), {"forward": forward})


def _fuse_rotary(module: Any) -> None:
    """Let the attention layers of a module of transformers rotate queries and keys in one kernel each."""
    original = module.apply_rotary_pos_emb
    if hasattr(original, "_plain"):
        return

    @wraps(original)
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if not is_gpu(q.device) or q.dtype != torch.bfloat16 or not _in_bf16(q):
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    apply._plain = original  # type: ignore[attr-defined]
    module.apply_rotary_pos_emb = apply


# Linear layers


class _Linear(nn.Linear):
    keeps_copy = False
    copies: tuple[Tensor | None, Tensor | None] | None = None  # of weight and bias

    def forward(self, x: Tensor) -> Tensor:
        if not (self.keeps_copy and self.weight.dtype == torch.float32 and _in_bf16(x)):
            return super().forward(x)
        if self.copies is None:
            self.copies = _bf16_copy(self.weight), _bf16_copy(self.bias)
        return linear(x, *self.copies)  # type: ignore[arg-type]


def _bf16_copy(parameter: Tensor | None) -> Tensor | None:
    """Return a copy whose gradient is added to that of the parameter."""
    if parameter is None:
        return None
    copy = parameter.detach().to(torch.bfloat16)
    if parameter.requires_grad:
        copy.requires_grad_().register_post_accumulate_grad_hook(partial(_accumulate, parameter))
    return copy


def _accumulate(parameter: Tensor, copy: Tensor) -> None:
    gradient, copy.grad = copy.grad, None
    assert gradient is not None
    if parameter.grad is None:
        parameter.grad = gradient.float()
    else:
        parameter.grad.add_(gradient)


# Kernels. Operators of torch, so that a dry run sees each as one kernel.


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return (silu(gate.float()) * up.float()).to(gate.dtype)


def _swiglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    wide, gated = grad.float(), gate.float()
    share = gated.sigmoid()
    slope = share * (1 + gated * (1 - share))
    return (wide * up.float() * slope).to(gate.dtype), (wide * gated * share).to(up.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    return (wide * cos.float() + _rotate_half(wide) * sin.float()).to(x.dtype)


def _rotated_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = grad.float()
    return (wide * cos.float() - _rotate_half(wide * sin.float())).to(grad.dtype)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function into one kernel at its first call. If that fails, for example without a C compiler, run it as it is."""
    kernel: Any = torch.compile(function, dynamic=True)

    def run(*tensors: Tensor) -> Any:
        nonlocal kernel
        try:
            return kernel(*tensors)
        except Exception as error:
            if kernel is function or isinstance(error, torch.OutOfMemoryError):
                raise
            _log.warning("%s cannot be compiled, so training is slower: %s", function.__name__.strip("_"), error)
            kernel = function
            return kernel(*tensors)

    return run


def _run(function: Callable[..., Any], *tensors: Tensor) -> Any:
    return (_compiled(function) if tensors[0].device.type == "cuda" else function)(*tensors)


@torch.library.custom_op("rstar_lab::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return _run(_swiglu, gate, up)


@torch.library.custom_op("rstar_lab::swiglu_gradients", mutates_args=())
def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _run(_swiglu_gradients, grad, gate, up)


@torch.library.custom_op("rstar_lab::rotate", mutates_args=())
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with rotary position embeddings. cos, sin: broadcast to x; no gradient flows into them."""
    return _run(_rotated, x, cos, sin)


@torch.library.custom_op("rstar_lab::rotate_back", mutates_args=())
def _rotate_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _run(_rotated_back, grad, cos, sin)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _save_angles(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


swiglu.register_fake(lambda gate, up: torch.empty_like(gate))
_swiglu_backward.register_fake(lambda grad, gate, up: (torch.empty_like(gate), torch.empty_like(up)))
rotate.register_fake(lambda x, cos, sin: torch.empty_like(x))
_rotate_back.register_fake(lambda grad, cos, sin: torch.empty_like(grad))
swiglu.register_autograd(lambda ctx, grad: _swiglu_backward(grad, *ctx.saved_tensors), setup_context=_save)
rotate.register_autograd(
    lambda ctx, grad: (_rotate_back(grad, *ctx.saved_tensors), None, None), setup_context=_save_angles
)
