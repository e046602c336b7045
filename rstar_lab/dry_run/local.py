"""One update, and one step of SFT, of the local trainer on fake tensors: `Learner.update` and the loss of `training.sft`."""

import contextlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.optim.optimizer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rstar_lab.dry_run.meter import Meter
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.models import gpu
from rstar_lab.rl.models.lora import attach_lora
from rstar_lab.rl.models.sources import get_model
from rstar_lab.rl.preflight import estimate
from rstar_lab.rl.preflight.context import KNOWN, Architecture
from rstar_lab.rl.recipe import Recipe, RlSection, SftConfig
from rstar_lab.rl.renderers.conversations import Example
from rstar_lab.rl.training import log_probs as log_probs_module
from rstar_lab.rl.training import sft as sft_module
from rstar_lab.rl.training import update as update_module
from rstar_lab.rl.training.data_parallel import SINGLE_RANK
from rstar_lab.rl.training.log_probs import MicroBatch
from rstar_lab.rl.trajectory import StopReason, Trajectory


def modules_stay() -> contextlib.AbstractContextManager[Any]:
    """Ignore `Module.to` in the block: fake parameters cannot be moved, and have the dtype that they need."""
    return patch.object(torch.nn.Module, "to", lambda module, *_, **__: module)


@contextlib.contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Join a fake process group as rank 0 of `ranks`."""
    import torch.distributed._tools.fake_collectives  # noqa: F401 (collectives of fake tensors)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fake_tensors(meter: Meter) -> Iterator[FakeTensorMode]:
    """Run the block on fake tensors, followed by `meter`."""
    import transformers.masking_utils as masking

    optimizers = sys.modules["torch.optim.optimizer"]  # `del`eted from the package
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        meter.resized(storage, size)
        return result

    backward = torch.Tensor.backward

    def labelled(*args: Any, **kwargs: Any) -> None:
        meter.phase = "backward"
        backward(*args, **kwargs)
        meter.phase = "optimizer"  # only gradient clipping and the step follow

    supported = optimizers._get_foreach_kernels_supported_devices()
    hooks = [
        optimizers.register_optimizer_step_pre_hook(lambda *_: setattr(meter, "phase", "optimizer")),
        optimizers.register_optimizer_step_post_hook(lambda *_: setattr(meter, "phase", "idle")),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [hook.remove() for hook in hooks])
        for owner, name, value in (
            (torch.UntypedStorage, "resize_", resized),
            (torch.Tensor, "backward", labelled),
            # Values of fake tensors that the code reads: a loss, a norm, a count.
            (FakeTensor, "item", lambda tensor: 1.0 if tensor.is_floating_point() else 1),
            (FakeTensor, "tolist", lambda tensor: [1] * tensor.numel() if tensor.dim() else 1),
            (FakeTensor, "__bool__", lambda _: True),
            (FakeTensor, "__float__", lambda _: 1.0),
            (FakeTensor, "__int__", lambda _: 1),
            (masking, "is_tracing", lambda *_: False),  # else transformers builds dense masks
            # As on a GPU, optimizers and gradient clipping process lists of tensors.
            (optimizers, "_get_foreach_kernels_supported_devices", lambda: [*supported, "cpu"]),
            (optimizers, "_foreach_supported_types", [*optimizers._foreach_supported_types, FakeTensor]),
        ):
            stack.enter_context(patch.object(owner, name, value))
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        yield mode


def model_config(model: str, shape: Architecture) -> Any:
    """Return the config of a model folder, or for a known name that of Qwen with its shape."""
    from transformers import AutoConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    if shape not in KNOWN.values():
        folder = get_model(model, weights=False)
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    sizes = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "intermediate_size": shape.feed_forward, "max_position_embeddings": shape.positions,
        "tie_word_embeddings": shape.tied,
    }  # fmt: skip
    if shape.experts:
        experts = {"num_experts": shape.experts, "num_experts_per_tok": shape.active_experts}
        return Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=shape.feed_forward)
    return (Qwen2Config if "Qwen2" in model else Qwen3Config)(**sizes)


def fake_model(config: Any, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    """Return a model of this config, without reading or computing values. Call it inside `fake_tensors`."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    return model


def rollouts(count: int, tokens: int) -> list[Trajectory]:
    """Return rollouts of `tokens` tokens each."""
    prompt = min(estimate.PROMPT_TOKENS, tokens // 2)
    response = tokens - prompt
    return [
        Trajectory(
            traj_id=f"t{i}", problem_id="p", group_id=f"g{i // 2}", sample=i, question="", truth="",
            prompt_ids=[i + 1] * prompt, response_ids=[1] * response, loss_mask=[True] * response,
            log_probs=[0.0] * response, turns=(), calls=(), stop_reason=StopReason.ANSWERED, text="", answer=None,
            reward=0.0, p_err=0.0, p_format=0.0, engine="", policy_version=0,
        )
        for i in range(count)
    ]  # fmt: skip


def rows_of(tokens: int, typical: float) -> tuple[int, int]:
    """Return (rows, tokens of each) of a micro-batch of `tokens` tokens with rows of at least the typical length."""
    rows = max(1, int(tokens // typical))
    return rows, tokens // rows


def run_update(recipe: Recipe, rl: RlSection, shape: Architecture, rows: int, width: int, meter: Meter) -> None:
    """Run one update of one micro-batch of `rows` rollouts of `width` tokens."""
    batch = rollouts(rows, width)
    bf16 = update_module.uses_bf16(rl, torch.device("cuda"))
    rl = rl.model_copy(update={"mini_batches": 1, "precision": "bf16" if bf16 else "fp32"})
    (micro,) = log_probs_module.micro_batches(batch, rows * width, torch.device("meta"), shared_width=0)
    with ExitStack() as stack:
        stack.enter_context(patch.object(update_module.UpdateResult, "read", lambda _: None))
        stack.enter_context(_gpu_kernels())
        stack.enter_context(fake_tensors(meter))
        config = model_config(recipe.model, shape)
        model = fake_model(config, torch.bfloat16 if rl.lora is not None and bf16 else torch.float32)
        if rl.lora is not None:
            with modules_stay():
                attach_lora(model, rl.lora, 0)
        learner = update_module.Learner(model)
        reference = fake_model(config, torch.float32) if rl.method.kl_coefficient else None
        if reference is not None:
            meter.track(reference)
        learner.begin_stage(rl, reset=True, reference=reference)
        assert learner.optimizer is not None
        allocate_state(learner.optimizer)
        meter.track(model, learner.optimizer)
        own = replace(micro, **_fakes_of(micro))
        learner.micro_batches = lambda *_: iter([own])  # type: ignore[method-assign]
        meter.reset()
        meter.phase = "forward"
        learner.update(Selection.of(batch, [1.0] * rows), rl, lr_scale=1.0, seed=0)


def run_sft(recipe: Recipe, shape: Architecture, count: int, tokens: int, meter: Meter) -> None:
    """Run one step of SFT on one micro-batch of `count` conversations of `tokens` tokens."""
    assert recipe.sft is not None
    section = recipe.sft
    examples = [Example([1] * tokens, [False] * (tokens // 2) + [True] * (tokens - tokens // 2))] * count
    rows = sft_module.SftRows.of(examples, section.packing)
    bf16 = section.precision != "fp32"
    with _gpu_kernels(), fake_tensors(meter):
        dtype = torch.bfloat16 if section.lora is not None and bf16 else torch.float32
        model = fake_model(model_config(recipe.model, shape), dtype)
        if section.lora is not None:
            with modules_stay():
                attach_lora(model, section.lora, 0, "sft.lora")
        config = SftConfig(**section.model_dump(include=set(SftConfig.model_fields)))
        optimizers = sft_module._optimizers(model, config, SINGLE_RANK)
        for optimizer in optimizers:
            allocate_state(optimizer)
            meter.track(model, optimizer)
        model.train()
        gpu.use_fast_layers(model)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        own = replace(rows, **_fakes_of(rows))
        meter.reset()
        meter.phase = "forward"
        with gpu.bf16_weights(model):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = sft_module.rows_loss(model, own)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for optimizer in optimizers:
            optimizer.step()


@contextmanager
def _gpu_kernels() -> Iterator[None]:
    """Let the trainer run its kernels for GPUs."""

    def norm(tensor: Tensor, shape: list[int], weight: Tensor, epsilon: float) -> Tensor:
        # torch decomposes RMSNorm on CPUs. The kernel of this norm reads and writes the same tensors.
        return torch.native_layer_norm(tensor, shape, weight, None, epsilon)[0]

    with patch.object(gpu, "is_gpu", lambda _: True), patch.object(gpu, "rms_norm", norm):
        yield


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of the optimizer, as its first step does, and gradients, as those of an earlier micro-batch."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        if isinstance(optimizer, torch.optim.Adam):  # a step of DTensors takes a fifth of the time of a dry run
            optimizer._init_group(group, [], [], [], [], [], [])
    if not optimizer.state:
        optimizer.step()


def _fakes_of(rows: MicroBatch | sft_module.SftRows) -> dict[str, Any]:
    """Return a fake tensor for each tensor of a dataclass, by name."""
    named = {field.name: getattr(rows, field.name) for field in fields(rows)}
    return {
        name: torch.empty(value.shape, dtype=value.dtype) for name, value in named.items() if isinstance(value, Tensor)
    }
