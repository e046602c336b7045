"""`rstar-lab bench scale`: the processes of a verl job that handle every rollout, at the paper's size (16,384 rollouts, 64 servers).

The rollouts and servers are scripted, so the lines measure the trainer's process, the writer of transcripts and the scheduler.
`against` is a limit set by this project; `ratio` is the limit divided by the value.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rstar_lab.rl.scheduling.scheduler import Scheduler

ROLLOUTS, SERVERS, TURNS = 16_384, 64, 3


def bench(*, rollouts: int = ROLLOUTS) -> Iterator[dict[str, Any]]:
    """Yield memory and times of one step, and the CPU time of the scheduler. rollouts: a multiple of 64."""
    from benchmarks.verl_scale import TOKENS, measure_step

    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        step = measure_step(rollouts, Path(folder))
    size = f"rollouts of {TOKENS} tokens"
    yield _line("driver_memory", step["memory_gb"], f"GB, trainer's process, {size}", 2.0, rollouts)
    yield _line("driver_select", step["select_s"], "s, fetch numbers and RoC", 10.0, rollouts)
    yield _line("driver_store", step["rows_s"], "s, rows of rollouts and calls", 10.0, rollouts)
    yield _line("writer_log_probs", step["values_s"], "s, writer, before the update", None, rollouts)
    yield _line("writer_transcripts", step["transcripts_s"], "s, writer, during the update", None, rollouts)
    milliseconds = asyncio.run(measure_scheduler("adaptive", servers=SERVERS, rollouts=rollouts))
    decisions = rollouts * TURNS
    yield _line("scheduler_decision", milliseconds, f"ms per turn, {SERVERS} servers", 1.0, decisions)
    yield _line("scheduler_step", milliseconds * decisions / 1000, "s of one core per step", None, decisions)


async def measure_scheduler(policy: str, *, servers: int, rollouts: int) -> float:
    """Return the CPU milliseconds of one turn (admit, finish and bookkeeping) with scripted servers.

    They include the event loop and its timers.
    """
    scheduler = Scheduler(policy, max_tokens=16_384)
    for number in range(servers):
        scheduler.add_server(f"s{number}", 800_000)
    lengths = np.random.default_rng(0).lognormal(7.0, 0.8, (rollouts, TURNS)).clip(1, 5000).astype(int)
    scheduler.begin_step(rollouts)

    async def drive(index: int) -> None:
        tokens = 300
        for turn in range(TURNS):
            await scheduler.admit(str(index), f"p{index // 32}", tokens)
            generated = int(lengths[index, turn])
            await asyncio.sleep(generated * 1e-3)  # turns end one by one, as on real servers
            tokens += generated + 100
            scheduler.finish(str(index), generated, done=turn == TURNS - 1)

    start = time.process_time()
    await asyncio.gather(*(drive(index) for index in range(rollouts)))
    seconds = time.process_time() - start
    assert scheduler.stats()["decisions"] == rollouts * TURNS
    return 1000 * seconds / (rollouts * TURNS)


def _line(name: str, value: float, unit: str, limit: float | None, n: int) -> dict[str, Any]:
    return {
        "name": name, "value": value, "unit": unit, "against": None if limit is None else f"limit {limit:g}",
        "ratio": None if limit is None else limit / max(value, 1e-9), "n": n,
    }  # fmt: skip
