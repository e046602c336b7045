"""Register the agent loop, engine, objective and learning-rate schedule in verl.

verl only logs a plug-in that fails to load, at DEBUG level, so `assert_registered` runs at start-up.
"""

import importlib
import os
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import AttentionInterface
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional
from verl.workers.engine.fsdp.transformer_impl import EngineTrainModeCtx
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from rstar_lab.rl.models.update_mode import without_noise
from rstar_lab.rl.step import lr_scale
from rstar_lab.rl.verl import WITHOUT_NOISE, attention, checkpoints, cpu, objective  # noqa: F401 (register themselves)
from rstar_lab.rl.verl.config import PACKED_ATTENTION

AGENT_LOOP = "rstar"
ENGINE = "rstar"


class StageSchedule(LambdaLR):
    """lr * min(1, (updates + 1) / warmup_steps). Learning rate and weight decay always come from the recipe, not from a checkpoint."""

    def __init__(self, optimizer: Optimizer, num_warmup_steps: int, **_: Any):
        super().__init__(optimizer, lambda updates: lr_scale(updates, num_warmup_steps))
        decay = [group["weight_decay"] for group in optimizer.param_groups]

        def keep_own(loaded: Optimizer) -> None:
            for group, base, weight_decay in zip(loaded.param_groups, self.base_lrs, decay, strict=True):
                group |= {"initial_lr": base, "weight_decay": weight_decay}
            self._apply()

        optimizer.register_load_state_dict_post_hook(keep_own)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rates = self.base_lrs
        super().load_state_dict(state_dict)
        self.base_lrs = rates
        self._apply()

    def _apply(self) -> None:
        for group, base, of_update in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True):
            group["lr"] = base * of_update(self.last_epoch)


RolloutReplicaRegistry.register(ENGINE, lambda: importlib.import_module("rstar_lab.rl.verl.engine").Replica)
_ROLLOUT_REGISTRY[(ENGINE, "async")] = "rstar_lab.rl.verl.engine.ServerAdapter"
_agent_loop_registry[AGENT_LOOP] = {"_target_": "rstar_lab.rl.verl.agent_loop.RstarAgentLoop"}
# verl has no registry for schedules. Its constant one starts at 0 and continues the schedule of the previous stage.
torch_functional.get_constant_schedule_with_warmup = StageSchedule  # type: ignore[assignment]
if os.environ.get("VERL_PLATFORM") == cpu.NAME:
    cpu.disable_cpu_offload()
if os.environ.get(WITHOUT_NOISE):
    enter = EngineTrainModeCtx.__enter__

    def enter_without_noise(mode: EngineTrainModeCtx) -> None:
        enter(mode)
        without_noise(mode.engine.module)

    EngineTrainModeCtx.__enter__ = enter_without_noise  # type: ignore[method-assign]


def assert_registered() -> None:
    """Raise RuntimeError that names the parts that are not registered in verl."""
    registered = {
        "agent loop": AGENT_LOOP in _agent_loop_registry,
        "engine": ENGINE in RolloutReplicaRegistry._registry and (ENGINE, "async") in _ROLLOUT_REGISTRY,
        "advantage": objective.ADVANTAGE in core_algos.ADV_ESTIMATOR_REGISTRY,
        "attention": PACKED_ATTENTION in AttentionInterface(),
        "platform": PlatformRegistry.get(cpu.NAME) is not None,
    }
    missing = [name for name, there in registered.items() if not there]
    if missing:
        raise RuntimeError(
            f"not registered in verl: {', '.join(missing)}; the plug-in of rstar_lab did not load: "
            "run `python -c 'import verl, rstar_lab.rl.verl.plugin'` to see the error"
        )
