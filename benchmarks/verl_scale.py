"""One step at the paper's size with scripted rollouts, for `rstar-lab bench scale`: the memory and time of the trainer's process.

The rollouts go through the real transfer queue and the real writer of transcripts; there is no model, engine or sandbox.
"""

import logging
import pickle
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.algorithm.selection import select_rollouts
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.trajectory import StopReason, ToolCallRecord, Trajectory, Turn
from rstar_lab.rl.verl.sampler import fetch_rollouts
from rstar_lab.rl.verl.transcripts import find_writer, split, start_writer
from rstar_lab.runs.schema import step_file
from rstar_lab.runs.writer import RunWriter

RUN = "scale-rl"
TOKENS, GROUP = 8_000, 32


def scripted(rng: np.random.Generator) -> Trajectory:
    """Return a rollout of four turns with one call each."""
    turn_text = "The value of x is then at most seven, so we try again with code and compute it once more. " * 88
    turns, calls = [], []
    for number in range(4):
        start, end = number * 2000, number * 2000 + 1900
        turns.append(Turn(start, end, turn_text, 1.0, 0.3, 0.1))
        calls.append(ToolCallRecord(number, 0, "python", "print(1)", Outcome.EXCEPTION, "Traceback" * 9, 0.1, 0.2, end))
    return Trajectory(
        traj_id="", problem_id="", group_id="", sample=0, question="q" * 300, truth="42", prompt_ids=list(range(300)),
        response_ids=rng.zipf(1.3, TOKENS).clip(0, 150_000).tolist(), loss_mask=[i % 2000 < 1900 for i in range(TOKENS)],
        log_probs=(-rng.exponential(0.3, TOKENS)).tolist(), turns=tuple(turns), calls=tuple(calls),
        stop_reason=StopReason.ANSWERED, text=turn_text * 4, answer="42", reward=0.0, p_err=0.0, p_format=0.0, engine="e",
        policy_version=0,
    )  # fmt: skip


def roll_out(first: int, last: int) -> None:
    """Put the rollouts first to last into the transfer queue and the writer, as an agent-loop worker does."""
    tq.init()
    writer, rng, chance = find_writer(RUN), np.random.default_rng(first), random.Random(first)
    model = scripted(rng)
    values = torch.tensor(model.log_probs, dtype=torch.float32)
    for start in range(first, last, 64):
        keys, fields, sent = [], [], []
        for index in range(start, min(start + 64, last)):
            group, sample = divmod(index, GROUP)
            names: dict[str, Any] = {
                "traj_id": f"{RUN}-{group:04d}-{sample:02d}",
                "group_id": f"{group:04d}",
                "problem_id": f"p{group}",
            }
            trajectory = replace(
                model, **names, sample=sample, reward=float(chance.random() < 0.5), p_err=chance.random()
            )
            numbers, transcript = split(trajectory, with_texts=False)
            sent.append(writer.add.remote(trajectory.traj_id, transcript))
            keys.append(trajectory.traj_id)
            extra = {"rollout": pickle.dumps(numbers)}
            fields.append({"extra_fields": extra, "old_log_probs": values, "entropy": values.abs()})
        ray.get(sent)
        tq.kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict(fields), tags=[{}] * len(keys), partition_id="train"
        )


def measure_step(rollouts: int, runs_dir: Path) -> dict[str, float]:
    """Select and store one step of scripted rollouts in a Ray cluster of its own.

    Returns the growth of this process's memory in GB (memory_gb), the seconds in which it fetches the numbers of the rollouts and
    selects with RoC (select_s) and writes the rows of rollouts and calls (rows_s), and those in which the writer reads the
    trainer's log-probs (values_s) and writes the transcripts (transcripts_s).
    """
    process, rl = psutil.Process(), RlSection(problems_per_step=rollouts // GROUP, group_size=GROUP // 2)
    ray.init("local", num_cpus=8, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        tq.init()
        writer = start_writer(RUN)
        ray.get(writer.__ray_ready__.remote())
        ray.get([ray.remote(roll_out).remote(first, first + rollouts // 2) for first in (0, rollouts // 2)])
        before, started = process.memory_info().rss, time.monotonic()
        keys = [f"{RUN}-{index // GROUP:04d}-{index % GROUP:02d}" for index in range(rollouts)]
        found = fetch_rollouts(keys, "train")
        selection = select_rollouts([one.outline for one in found], rl.hooks, 1)
        selected = time.monotonic()
        kept = [t.traj_id for t in selection.trajectories]
        values = ray.get(writer.add_trainer_values.remote({name: name for name in kept}, 0))
        scored = time.monotonic()
        fill = {"run_id": RUN, "stage": "rl", "step": 1}
        with RunWriter.open(runs_dir, RUN, kind="train", recipe={}, seed=0) as run:
            path = step_file(run.run_dir, "transcripts", "rl", 1)
            written = ray.get(writer.write.remote(path, fill, keys, kept, "all"))
            stored = time.monotonic()
            rows, calls = [one.row for one in found], [call for one in found for call in one.calls]
            run.write_step("rl", 1, trajectories=rows, calls=calls, transcripts=written, metrics={})
        ended = time.monotonic()
        memory = process.memory_info().rss - before
    finally:
        tq.close()
        ray.shutdown()
    assert values.mismatch == 0.0 and len(values.means) == len(kept)
    return {
        "memory_gb": memory / 1e9,
        "select_s": selected - started,
        "rows_s": ended - stored,
        "values_s": scored - selected,
        "transcripts_s": stored - scored,
    }
