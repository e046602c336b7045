"""The package's parts under their names in verl's registries.

verl logs a plug-in that fails to load at DEBUG only, and goes on without it: `assert_registered` is called at start.
"""

import os

from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.trainer.ppo import core_algos
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from rstar_lab.rl.verl import cpu, objective, schedule

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
    cpu.offload_nothing()


def assert_registered() -> None:
    """Raises RuntimeError that says what of this package verl does not know."""
    losses = [objective.loss_name(variant) for variant in objective.VARIANTS]
    found = {
        "agent loop": AGENT_LOOP in _agent_loop_registry,
        "engine": ENGINE in RolloutReplicaRegistry._registry and (ENGINE, "async") in _ROLLOUT_REGISTRY,
        "policy loss": all(loss in core_algos.POLICY_LOSS_REGISTRY for loss in losses),
        "advantage": objective.ADVANTAGE in core_algos.ADV_ESTIMATOR_REGISTRY,
        "platform": PlatformRegistry.get(cpu.NAME) is not None,
    }
    missing = [name for name, there in found.items() if not there]
    if missing:
        raise RuntimeError(
            f"verl does not know this package's {', '.join(missing)}: its plug-in did not load; "
            "`python -c 'import verl, rstar_lab.rl.verl.plugin'` shows why"
        )
