"""The trainer's process under verl at the size of the paper's step: 16,384 rollouts of 8,000 tokens, through the real transfer
queue and the real writer of transcripts."""

import importlib.util
import os
import pickle
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from rstar_lab.outcomes import Outcome
from rstar_lab.rl.algorithm.selection import select_rollouts
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.trajectory import StopReason, ToolCallRecord, Trajectory, Turn
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.schema import step_file
from rstar_lab.runs.writer import RunWriter

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed here", allow_module_level=True)

RUN = "paper-rl"
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
    import ray
    import torch
    import transfer_queue as tq
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    from rstar_lab.rl.verl.transcripts import find_writer, split

    tq.init()
    writer, rng, chance = find_writer(RUN), np.random.default_rng(first), random.Random(first)
    model = scripted(rng)
    values = torch.tensor(model.log_probs, dtype=torch.float32)
    for start in range(first, last, 64):
        keys, fields, sent = [], [], []
        for index in range(start, min(start + 64, last)):
            group, sample = divmod(index, GROUP)
            names = {
                "traj_id": f"{RUN}-{group:04d}-{sample:02d}",
                "group_id": f"{group:04d}",
                "problem_id": f"p{group}",
            }
            trajectory = replace(
                model, **names, sample=sample, reward=float(chance.random() < 0.5), p_err=chance.random()
            )
            numbers, transcript = split(trajectory, whole=False)
            sent.append(writer.add.remote(trajectory.traj_id, transcript))
            keys.append(trajectory.traj_id)
            extra = {"rollout": pickle.dumps(numbers)}
            fields.append({"extra_fields": extra, "old_log_probs": values, "entropy": values.abs()})
        ray.get(sent)
        tq.kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict(fields), tags=[{}] * len(keys), partition_id="train"
        )


def measure(rollouts: int, runs_dir) -> dict[str, float]:
    """Select and store one step; return seconds, and the growth of this process's memory in GB."""
    import ray
    import transfer_queue as tq

    from rstar_lab.rl.verl.sampler import fetch_rollouts
    from rstar_lab.rl.verl.transcripts import start_writer

    process, rl = psutil.Process(), RlSection(problems_per_step=rollouts // GROUP, group_size=GROUP // 2)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])  # for `roll_out`
    environment = {"env_vars": {"PYTHONPATH": path}}
    ray.init("local", num_cpus=8, include_dashboard=False, logging_level="error", runtime_env=environment)
    try:
        tq.init()
        writer = start_writer(RUN)
        ray.get(writer.__ray_ready__.remote())
        ray.get([ray.remote(roll_out).remote(a, a + rollouts // 2) for a in (0, rollouts // 2)])
        before, started = process.memory_info().rss, time.monotonic()
        keys = [f"{RUN}-{index // GROUP:04d}-{index % GROUP:02d}" for index in range(rollouts)]
        found = fetch_rollouts(keys, "train")
        selection = select_rollouts([one.outline for one in found], rl.selection_config, 1)
        selected = time.monotonic()
        kept = [t.traj_id for t in selection.trajectories]
        values = ray.get(writer.add_trainer_values.remote({name: name for name in kept}))
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
        "fetch_and_select_s": selected - started,
        "trainer_values_s": scored - selected,
        "transcripts_s": stored - scored,
        "rows_s": ended - stored,
        "memory_gb": memory / 1e9,
    }


@pytest.mark.slow
def test_tokens_and_texts_do_not_reach_the_trainers_process(tmp_path):
    rollouts = 512
    found = measure(rollouts, tmp_path)
    tokens = rollouts * TOKENS * 9  # bytes: ids, mask and log-probs in compact form
    assert found["memory_gb"] * 1e9 < tokens, found
    reader = RunReader(tmp_path / RUN)
    table = reader.read("transcripts", ["traj_id", "response_ids", "trainer_log_probs"])
    assert table.num_rows == rollouts and table["traj_id"].to_pylist() == sorted(table["traj_id"].to_pylist())
    assert set(len(ids) for ids in table["response_ids"].to_pylist()) == {TOKENS}
    assert table["trainer_log_probs"].null_count == rollouts // 2


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_step_of_the_paper_stays_under_2_gb(tmp_path):
    found = measure(16_384, tmp_path)
    print(found)
    assert found["memory_gb"] < 2, found
