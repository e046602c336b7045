"""`rstar-lab bench rollout --verl`: the scheduling policies on three vLLM servers of a verl job.

The servers, the scheduler actor and the engine of a rollout are those of a job; there is no trainer. Every policy runs
the same scripted rollouts, with a KV cache so small that requests are preempted. The simulator predicts the makespans from rates
that are fitted on the same servers. All servers share the cores of this machine.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from benchmarks.calibration import (
    BLOCK_TOKENS,
    REGIME,
    SEED,
    Measurement,
    disagreements,
    fit_rates,
    run_scripts,
    save_tiny_model,
)
from benchmarks.simulated_engine import EngineSpec
from benchmarks.simulator import ScriptedRollout, simulate
from benchmarks.workloads import make_policies, make_rollouts
from rstar_lab.rl.recipe import EngineSection
from rstar_lab.rl.scheduling.policies import POLICIES

if TYPE_CHECKING:
    from benchmarks.verl_fleet import Fleet
    from rstar_lab.rl.verl.engine import ScheduledEngine

# Names of the policies, as the recipe key `engine.scheduler` accepts them.
NAMES = {"turn-barrier": "benchmarks.barrier:TurnBarrier", "static": "benchmarks.barrier:Static"}
NAMES |= {name: name for name in POLICIES}
SERVERS, ROUNDS, MAX_RUNNING, MAX_TOKENS = 3, 2, 64, 2048
# KV cache of the tiny model: layers x heads x size of a head x (K and V) x bytes of a float32.
BYTES_PER_TOKEN = 4 * 4 * 32 * 2 * 4
WORKLOAD = REGIME.model_copy(update={"engines": SERVERS, "rollouts": 32})


def bench() -> Iterator[dict[str, Any]]:
    """Yield one line per policy (measured and predicted makespan in seconds), and `verl_ranking`: pairs that the simulator misorders."""
    from benchmarks.verl_fleet import own_cluster, start_servers

    rollouts, _ = make_rollouts(WORKLOAD, SEED)
    with tempfile.TemporaryDirectory(prefix="rstar-bench-") as name, own_cluster():
        model = Path(name) / "model"
        save_tiny_model(model)
        section = EngineSection(
            dtype="float32", max_num_seqs=MAX_RUNNING, kv_cache_gb=WORKLOAD.kv_tokens * BYTES_PER_TOKEN / 2**30
        )
        options = {"section": section.model_dump(), "max_tokens": MAX_TOKENS, "seed": 0, "logs": name}
        servers = start_servers("rstar_lab.rl.verl.engine:CpuVllm", str(model), options, SERVERS)
        measurements = asyncio.run(measure(servers, rollouts))
    barrier = measurements["turn-barrier"].measured
    for name, result in measurements.items():
        yield {
            "name": f"verl_{name}", "value": result.measured, "unit": "s for all rollouts", "ratio": barrier / result.measured,
            "against": f"turn-barrier, {barrier:.1f} s; predicted {result.predicted_s:.1f} s", "n": len(rollouts),
        }  # fmt: skip
    wrong = disagreements(list(measurements.values()))
    yield {
        "name": "verl_ranking", "value": len(wrong), "unit": "pairs in another order", "ratio": None,
        "against": "the simulator" + "".join(f"; {first} before {second}" for first, second in wrong),
        "n": len(NAMES) * (len(NAMES) - 1) // 2,
    }  # fmt: skip


async def measure(servers: dict[str, Any], rollouts: list[ScriptedRollout]) -> dict[str, Measurement]:
    """Run every policy ROUNDS times, alternating, and predict its makespan; return the measurements by policy."""
    from benchmarks.verl_fleet import OneServer, with_scheduler

    rates = await fit_rates([OneServer(server) for server in servers.values()], WORKLOAD.kv_tokens)
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(ROUNDS):
        for name, scheduler in NAMES.items():
            fleet = with_scheduler(
                servers,
                scheduler,
                max_tokens=MAX_TOKENS,
                max_response_tokens=WORKLOAD.max_context,
                max_running=MAX_RUNNING,
            )
            await fleet.scheduler.begin_step.remote(len(rollouts))
            seconds[name].append(await run_scripts(rollouts, partial(make_slot, fleet, uuid4().hex)))
            fleet.close()
    spec = EngineSpec(
        rates, WORKLOAD.kv_tokens, max_running=MAX_RUNNING, max_batched_tokens=8192, block_tokens=BLOCK_TOKENS
    )
    policies = make_policies(WORKLOAD)
    return {
        name: Measurement(name, simulate(rollouts, policies[name](), [spec] * SERVERS).makespan_s, seconds[name], 0, [])
        for name in NAMES
    }


def make_slot(fleet: "Fleet", run: str, index: int, script: ScriptedRollout) -> "ScheduledEngine":
    """Return the engine that generates one rollout. run: prefix that makes the ids of rollouts unique across runs."""
    return fleet.slot(f"{run}-{index}", script.problem)
