"""Register the agent loop, engine, objective and learning-rate schedule in verl.

verl only logs a plug-in that fails to load, at DEBUG level, so `assert_registered` runs at start-up.
"""

import os

from transformers import AttentionInterface
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.trainer.ppo import core_algos
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from rstar_lab.rl.verl import attention, checkpoints, cpu, log_probs, objective, schedule  # noqa: F401 (register themselves)
from rstar_lab.rl.verl.config import PACKED_ATTENTION

AGENT_LOOP = "rstar"
ENGINE = "rstar"


def _replica() -> type:
    from rstar_lab.rl.verl.engine import Replica

    return Replica


RolloutReplicaRegistry.register(ENGINE, _replica)
_ROLLOUT_REGISTRY[(ENGINE, "async")] = "rstar_lab.rl.verl.engine.ServerAdapter"
_agent_loop_registry[AGENT_LOOP] = {"_target_": "rstar_lab.rl.verl.agent_loop.RstarAgentLoop"}
schedule.use_stage_schedule()
if os.environ.get("VERL_PLATFORM") == cpu.NAME:
    cpu.disable_cpu_offload()


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
