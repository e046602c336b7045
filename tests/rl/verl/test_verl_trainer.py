"""Tests that two GRPO-RoC steps with verl's real trainer on a CPU equal the local trainer's.

verl has one rank, in `make test-rest` two; `make test-all` also kills it after the first checkpoint and starts it again. Both sides
have the same problems, model, seeds, scripted engine and real sandbox. All tests here use the same pair of runs.
"""

import asyncio
import contextlib
import json
import os
import signal
import time

import numpy as np
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.verl_parity import RUN, compare, prepare, start_verl, train_locally
from benchmarks.verl_scripted import ScriptedEngines
from rstar_lab.hardware.local_ray import LocalRay
from rstar_lab.rl.engine import Sampling
from rstar_lab.rl.engines.group import CPU_ENVIRONMENT
from rstar_lab.rl.engines.vllm import VllmEngine
from rstar_lab.rl.evaluation import evaluate
from rstar_lab.rl.models.model import load_model, load_tokenizer
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.resolved import read_problems
from rstar_lab.rl.reward import reward
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.rl.training.stages import difficulty_file
from rstar_lab.rl.verl.settings import has_steps_left, stages_of
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.writer import RunWriter
from rstar_lab.sandbox import LocalSandbox

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
OPTIONS = {
    "method": {"aggregation": "group-token-mean", "add": [{"type": "overlong_buffer", "tokens": 500}]},
    "mini_batches": 2, "warmup_steps": 3, "correction": {"type": "tis", "bounds": [0, 2.0]},
    "schedule": {"dynamic_sampling": 1},
}  # fmt: skip

EVALUATE = {
    "sets": {"held": {"synthetic": {"count": 3, "seed": 9}}}, "during": {"every": 2}, "samples": 2, "max_response_tokens": 700,
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[
        "one rank",
        pytest.param("two ranks", marks=pytest.mark.rest),
        pytest.param("killed", marks=pytest.mark.soak),
    ],
)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def attempts(kind):
    """Number of starts of verl. With 2, it is killed after its first checkpoint and started again."""
    return 2 if kind == "killed" else 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory, kind, attempts):
    """Return the run folders (local trainer, verl)."""
    folder = tmp_path_factory.mktemp("verl")
    recipe = prepare(folder, evaluate=EVALUATE, stage={"filter": {"samples": 3}}, **OPTIONS)
    log, newest = folder / "verl" / "verl.log", folder / "verl" / RUN / "verl" / "latest_checkpointed_iteration.txt"
    ranks = 2 if kind == "two ranks" else 1

    def start():
        settings = ("verl.trainer.logger=[tensorboard, wandb]", f"verl.trainer.n_gpus_per_node={ranks}")
        return start_verl(recipe, folder / "verl", *(word for text in settings for word in ("--set", text)))

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("WANDB_MODE", "offline")  # Ray's workers inherit it
        # Both attempts use this Ray. verl reserves 3 CPUs per rank.
        stack.enter_context(LocalRay(cpus=4 * ranks + 8, gpus=ranks, dashboard=False))
        process = start()
        try:
            ours = train_locally(recipe, folder / "local")
            while attempts > 1 and not (newest.exists() and newest.read_text()):
                assert process.poll() is None, log.read_text(errors="replace")[-3000:]
                time.sleep(0.05)
            if attempts > 1:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                process = start()
            assert process.wait(1500) == 0, log.read_text(errors="replace")[-3000:]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return ours, folder / "verl" / RUN


def test_kept_rollouts_loss_and_gradient_equal_the_local_trainers(runs):
    found = compare(*runs)
    assert found.differences == []
    assert found.steps == 2 and found.rollouts >= 2 * 4 * 8


def test_the_compared_runs_contain_updates_and_tool_errors(runs):
    table = ds.dataset(runs[1] / "trajectories", partitioning=None).to_table().to_pandas()
    assert set(table["kept"]) == {True, False}
    assert set(table["reward"]) == {0.0, 1.0}
    assert table["p_err"].nunique() > 2
    assert {"ok", "exception"} <= {outcome for row in table["outcomes"] for outcome in row}, "the sandbox was real"
    metrics = RunReader(runs[1]).metrics()
    assert all(np.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in metrics)


def test_weights_after_both_steps_equal_the_local_trainers(runs):
    ours, theirs = (load_file(run / "checkpoints" / "step=000002" / "model.safetensors") for run in runs)
    start = load_file(runs[0].parent.parent / "model" / "model.safetensors")
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name].float(), tensor.float(), rtol=0, atol=2e-4)
    assert any((tensor - start[name]).abs().max() > 5e-4 for name, tensor in ours.items()), "training moved the weights"


def test_the_run_store_has_each_step_once_with_all_rollouts(runs, attempts):
    info = json.loads((runs[1] / "run.json").read_text())
    assert info["status"] == "finished" and info["attempts"] == attempts
    assert [row["stage"] for row in info["result"]["stages"]] == ["one"]
    assert [line["step"] for line in RunReader(runs[1]).metrics()] == [1, 2]
    table = ds.dataset(runs[1] / "trajectories", partitioning=None).to_table().to_pandas()
    assert table["traj_id"].is_unique and set(table.groupby("group_id").size()) == {8}
    kept, dropped = table[table["kept"]], table[~table["kept"]]
    assert kept["trainer_log_prob"].notna().all() and kept["entropy"].notna().all()
    assert dropped["trainer_log_prob"].isna().all() and dropped["advantage"].isna().all()
    assert table[table["kept"]].groupby("group_id").size().eq(4).all()
    assert set(table["attempt"]) == set(range(1, attempts + 1))
    assert len(RunReader(runs[1]).vocabulary()) > 300


def test_verl_loggers_write_to_the_run_folder_and_the_console(runs):
    assert list((runs[1] / "tensorboard").glob("events.out.tfevents.*"))
    assert list((runs[1] / "wandb").glob("offline-run-*"))
    log = (runs[1].parent / "verl.log").read_text(errors="replace")
    assert "step:2 - " in log  # the killed process may not have logged step 1


def test_dropped_rollouts_are_not_trained_on(runs):
    for line in RunReader(runs[1]).metrics():
        assert line["sequence_tokens_informative"] / line["sequence_tokens_kept"] >= 1.5


def test_metrics_of_the_options_equal_the_local_trainers(runs):
    ours, theirs = (RunReader(run).metrics() for run in runs)
    for a, b in zip(ours, theirs, strict=True):
        for name in ("groups", "kept", "equal_groups", "retired", "solved_groups"):
            assert a[name] == b[name], name
        for name in ("importance_weight", "mismatch", "mismatch_max"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name
    assert any(line["groups"] > 4 for line in ours), "dynamic sampling replaced no group"
    # verl reports the rate of the next update. A schedule that restarts after the kill would report 2/3 twice.
    assert [line["verl/actor/lr"] for line in theirs] == pytest.approx([2e-3 / 3, 1e-3])


async def test_evaluations_of_the_training_equal_those_of_the_local_engines(runs):
    folder = runs[1].parent
    names = ["parity-held-base", "parity-held-rl", "parity-held-step000002"]
    assert sorted(path.name for path in folder.glob("parity-held-*")) == names
    line = RunReader(runs[1]).metrics()[1]
    assert 0 <= line["eval/held/low"] <= line["eval/held/pass1"] <= line["eval/held/high"] <= 1
    recipe = load_recipe(folder.parent / "parity.yaml")
    async with LocalSandbox(workers=1) as sandbox:
        tools = make_tools(["python"], sandbox, 5.0, 256)
        codec, engines = Codec(load_tokenizer(recipe.model), tools), ScriptedEngines(recipe.model)
        context = RolloutContext.for_evaluation(codec, tools, reward, recipe.rl, recipe.evaluate)
        with RunWriter.open(folder.parent, "expected", kind="evaluate", recipe={}, seed=0) as writer:
            problems = read_problems(recipe.evaluate.sets["held"])
            await evaluate(problems, context, samples=2, engines=engines, writer=writer, seed=recipe.seed, mode="async")

    def rows(run):
        table = RunReader(run).read("trajectories", ["problem_id", "sample", "reward", "outcomes", "response_tokens"])
        return sorted(map(str, table.to_pylist()))

    expected = rows(folder.parent / "expected")
    assert len(expected) == 6
    for name in names:
        reader, parent = RunReader(folder / name), None if name.endswith("base") else {"run": "parity-rl", "step": 2}
        assert reader.info["parent"] == parent and reader.info["status"] == "finished"
        assert rows(folder / name) == expected


def test_the_filter_runs_once_and_equals_the_local_trainers(runs):
    tables = [pq.read_table(difficulty_file(run, "one")).to_pylist() for run in runs]
    assert tables[0] == tables[1]
    assert {row["kept"] for row in tables[1]} == {True, False}
    assert all(row["samples"] == 3 and row["step"] == 0 for row in tables[1])
    readers = [RunReader(run.parent / "parity-rl-one-filter") for run in runs]
    assert readers[1].info["attempts"] == 1 and readers[1].info["parent"] == {"run": "parity-rl", "step": 0}
    rows = [
        sorted(reader.read("trajectories", ["problem_id", "sample", "reward"]).to_pylist(), key=str)
        for reader in readers
    ]
    assert rows[0] == rows[1] and len(rows[1]) == 3 * 8
    drawn = RunReader(runs[1]).read("trajectories", columns=["problem_id"]).to_pylist()
    assert {row["problem_id"] for row in drawn} <= {row["problem_id"] for row in tables[1] if row["kept"]}


def test_a_finished_run_starts_no_step(runs):
    recipe = load_recipe(runs[1].parent.parent / "parity.yaml")
    (settings,) = stages_of(recipe, runs[1].parent)
    assert not has_steps_left(settings)


def test_the_exported_model_loads_in_transformers_and_vllm(runs):
    folder = runs[1] / "checkpoints" / "step=000002"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32", "the dtype of the weights"
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, torch.float32)
    prompt = tokenizer.encode("What is six times seven?", add_special_tokens=False)
    options = {
        "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "skip_tokenizer_init": True, "enforce_eager": True,
        "distributed_executor_backend": "uni", "kv_cache_memory_bytes": 2**28, "logprobs_mode": "raw_logprobs",
    }  # fmt: skip

    async def ask():
        engine = VllmEngine(env=CPU_ENVIRONMENT)
        await engine.start(folder, options)
        try:
            return await engine.generate(prompt, Sampling(max_tokens=16, seed=1))
        finally:
            await engine.aclose()

    done = asyncio.run(ask())
    with torch.no_grad():
        logits = model(torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = logits.gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
    np.testing.assert_allclose(done.log_probs, expected.numpy(), atol=1e-4)
