"""One micro-batch and one optimizer step of verl's FSDP engine on fake tensors, as rank 0 of a fake process group.

The engine, its sharding, mixed precision, gradient checkpointing, attention, collectives, gradient clipping and optimizer are
verl's, with the configuration of the run; the loss is rstar_lab's. The forward step is written again here, because verl's takes
nested tensors, which have no fake version.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from verl.plugin.platform import platform_manager
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import logprobs_from_logits
from verl.utils.ulysses import (
    gather_outputs_and_unpad,
    set_ulysses_sequence_parallel_group,
    ulysses_pad_and_slice_inputs,
)
from verl.workers.engine.fsdp import transformer_impl

from rstar_lab.dry_run.local import allocate_state, fake_model, fake_ranks, fake_tensors, modules_stay
from rstar_lab.dry_run.meter import Meter
from rstar_lab.hardware.profiles import Profile
from rstar_lab.rl.models.sources import ModelError, get_model
from rstar_lab.rl.recipe import Recipe
from rstar_lab.rl.recipe.recipe import Stage
from rstar_lab.rl.verl import attention, cpu, hooks  # noqa: F401 (hooks registers the loss and the log-probs)
from rstar_lab.rl.verl.config import compose, overrides, sft_overrides
from rstar_lab.rl.verl.objective import POLICY_WEIGHTS, StreamLoss
from rstar_lab.rl.verl.settings import stages_of


class _DryEngine(transformer_impl.FSDPEngineWithLMHead):
    """verl's engine with a model that is built instead of loaded."""

    def _build_module(self) -> Any:
        attention = self.model_config.override_config["attn_implementation"]
        module = fake_model(self.model_config.hf_config, torch.float32, attention)
        transformer_impl.apply_monkey_patch(
            model=module,
            use_remove_padding=self.use_remove_padding,
            ulysses_sp_size=self.ulysses_sequence_parallel_size,
            use_fused_kernels=self.model_config.use_fused_kernels,
        )
        if self.model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module

    def _build_lora_module(self, module: Any) -> Any:
        with modules_stay():
            return super()._build_lora_module(module)


def run_stage(recipe: Recipe, stage: Stage, profile: Profile, hf_config: Any, lengths: list[int], meter: Meter) -> None:
    """Run the update of one micro-batch of a stage.

    Args:
        recipe, stage, profile: what to run.
        hf_config: config of the model.
        lengths: tokens of each sequence of the micro-batch, shared by the ranks of a sequence-parallel group.
        meter: follows the work from the forward pass on.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = next(one for one in stages_of(recipe, Path(folder)) if one.stage.name == stage.name)
        config = compose(overrides(settings, profile, _folder(recipe.model)))
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    stream_loss, prompt = StreamLoss(settings.rl), lengths[0] // 4

    def loss(log_probs: Tensor) -> Tensor:
        response_log_probs = pad_sequence([row[prompt:] for row in log_probs.split(lengths)], batch_first=True)
        ones, zeros = torch.ones_like(response_log_probs), torch.zeros_like(response_log_probs)
        tensors = {"response_mask": ones, "old_log_probs": response_log_probs.detach(), "advantages": zeros}
        tensors[POLICY_WEIGHTS] = ones
        return stream_loss.loss(response_log_probs, tensors)[0]

    _run(actor, model, profile, hf_config, lengths, loss, meter)


def run_sft(recipe: Recipe, profile: Profile, hf_config: Any, lengths: list[int], meter: Meter) -> None:
    """Run the SFT step of one micro-batch. Arguments: see `run_stage`."""
    assert recipe.sft is not None
    keys = sft_overrides(recipe.sft, profile, _folder(recipe.model), Path("dry-run"), 100)
    config = compose(keys, "sft_trainer_engine")
    section = SimpleNamespace(fsdp_config=config.engine, optim=config.optim)
    _run(section, config.model, profile, hf_config, lengths, lambda log_probs: -log_probs.mean(), meter)


def _folder(model: str) -> Path:
    """Return the folder of a model. One that is not on this machine does not matter: its shape is known by name."""
    with contextlib.suppress(ModelError):
        return get_model(model, weights=False)
    return Path(model)


def _run(
    section: Any,
    model: Any,
    profile: Profile,
    hf_config: Any,
    lengths: list[int],
    loss: Callable[[Tensor], Tensor],
    meter: Meter,
) -> None:
    kept = (
        "use_fused_kernels", "enable_gradient_checkpointing", "override_config", "lora_rank", "lora_alpha", "target_modules",
    )  # fmt: skip
    absent = ("fused_kernel_options", "target_parameters", "exclude_modules", "lora_adapter_path")
    own_config = SimpleNamespace(
        **{name: model[name] for name in kept} | dict.fromkeys(absent),
        hf_config=hf_config, model_type="language_model", local_path=model.path, trust_remote_code=False, use_liger=False,
        use_remove_padding=True, enable_activation_offload=False,
    )  # fmt: skip
    section.fsdp_config.strategy = "fsdp2"  # as verl's workers set it from the actor's strategy
    engine_config = omega_conf_to_dataclass(section.fsdp_config)
    optimizer_config = omega_conf_to_dataclass(section.optim)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))  # verl prints while it builds
        stack.enter_context(patch.object(platform_manager, "_current_platform", cpu.CpuPlatform()))
        stack.enter_context(fake_ranks(profile.hardware.gpus))
        stack.enter_context(patch.object(transformer_impl, "fsdp2_load_full_state_dict", lambda *_: None))
        stack.enter_context(patch.object(attention, "_sequence_lengths", lambda *_: lengths))
        engine = _DryEngine(own_config, engine_config, optimizer_config, None)
        stack.enter_context(fake_tensors(meter))
        engine._build_model_optimizer()
        allocate_state(engine.optimizer)
        meter.track(engine.module, engine.optimizer)
        set_ulysses_sequence_parallel_group(engine.ulysses_parallel_group)
        engine.module.train()
        meter.reset()
        meter.phase = "forward"
        _forward_step(engine, lengths, loss).backward()
        engine.optimizer_step()
        engine.optimizer_zero_grad()
        set_ulysses_sequence_parallel_group(None)


def _forward_step(engine: Any, lengths: list[int], loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the loss of one packed micro-batch, computed as by `FSDPEngineWithLMHead.forward_step`."""
    ids = torch.zeros(1, sum(lengths), dtype=torch.long)
    positions, labels, padding = torch.zeros_like(ids), torch.zeros_like(ids), 0
    if engine.use_ulysses_sp:
        size = engine.ulysses_sequence_parallel_size
        ids, positions, padding = ulysses_pad_and_slice_inputs(ids, positions, size)
        labels, _, _ = ulysses_pad_and_slice_inputs(labels, None, size)
    is_fp32 = engine._autocast_dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not is_fp32):
        logits = engine.module(input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False).logits[0]
        log_probs = logprobs_from_logits(logits, labels[0])
        if engine.use_ulysses_sp:
            log_probs = gather_outputs_and_unpad(log_probs, gather_dim=0, unpad_dim=0, padding_size=padding)
        return loss(log_probs)
