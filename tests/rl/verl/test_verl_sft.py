"""Tests that SFT with verl on a CPU, killed after a checkpoint and started again, equals the local trainer's.

The same command also runs the first RL step, which must start from the SFT model.
"""

import asyncio
import contextlib
import json
import os
import signal
import time

import pytest
import torch
import yaml
from rich.console import Console

from benchmarks.verl_parity import prepare, start_verl
from rstar_lab.analysis import open_runs, phase_table, results_table
from rstar_lab.common.progress import Reporter
from rstar_lab.hardware.local_ray import LocalRay
from rstar_lab.rl.models.model import load_model, load_tokenizer
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.pipeline import fine_tune
from rstar_lab.rl.renderers.conversations import Conversation, Message, reply, tool_calls, write_conversations
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.session import RunSession
from rstar_lab.runs.reader import RunReader

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
# 10 conversations make two batches of 4 and one of 2; the checkpoint after 12 steps lies at the end of an epoch.
SFT = {
    "epochs": 8, "batch_size": 4, "lr": 2e-3, "warmup": 0.1, "weight_decay": 0.01, "max_tokens": 1024, "precision": "fp32",
    "checkpoint_every": 12,
}  # fmt: skip
STEPS = 24
EVALUATE = {"sets": {"held": {"synthetic": {"count": 2, "seed": 9}}}, "samples": 2, "max_response_tokens": 500}


def conversation(n):
    """Return conversation n: every second one has a tool call, and all lengths differ."""
    middle = [("assistant", tool_calls([("f", {"a": n})], "I ask.")), ("tool", str(n)), ("tool", "x" * n)]
    turns = [("user", f"What is {n}?"), *(middle if n % 2 else []), ("assistant", reply(f"{n} it is" + "!" * n))]
    messages = tuple(Message(role=role, content=content) for role, content in turns)  # type: ignore[arg-type]
    return Conversation(conversation_id=str(n), source="test", messages=messages)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the runs folders (local trainer, verl)."""
    folder = tmp_path_factory.mktemp("sft")
    sizes = {"steps": 1, "problems_per_step": 2, "group_size": 2}
    recipe = prepare(folder, evaluate=EVALUATE, lr=1e-12, weight_decay=0.0, **sizes)
    write_conversations(folder / "c.jsonl", map(conversation, range(10)))
    content = yaml.safe_load(recipe.read_text())
    content["sft"] = SFT | {"conversations": [{"file": str(folder / "c.jsonl")}]}
    recipe.write_text(yaml.safe_dump(content))

    async def locally():
        async with RunSession.open(
            resolve(load_recipe(recipe, {"runs": str(folder / "local")})), Reporter(console=Console(quiet=True))
        ) as session:
            await fine_tune(session)

    asyncio.run(locally())
    run = folder / "verl" / "parity-sft"
    newest, log = run / "verl" / "latest_checkpointed_iteration.txt", folder / "verl" / "verl.log"
    with contextlib.ExitStack() as stack:
        stack.enter_context(LocalRay(cpus=8, gpus=1, dashboard=False))
        process = start_verl(recipe, folder / "verl")
        try:
            while not (newest.exists() and newest.read_text()):
                assert process.poll() is None, log.read_text(errors="replace")[-3000:]
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert not (run / "sft" / "sft.json").exists(), "the SFT finished before it was killed"
            process = start_verl(recipe, folder / "verl")
            assert process.wait(1500) == 0, log.read_text(errors="replace")[-3000:]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return folder / "local", folder / "verl"


def metrics(runs_dir):
    return [json.loads(line) for line in (runs_dir / "parity-sft" / "sft" / "metrics.jsonl").read_text().splitlines()]


def tensors(folder):
    return load_model(folder, torch.float32).state_dict()


def test_batches_losses_and_gradients_equal_the_local_trainers(runs):
    ours, theirs = map(metrics, runs)
    assert len(ours) == len(theirs) == STEPS
    for a, b in zip(ours, theirs, strict=True):
        assert (a["step"], a["steps"], a["tokens"], a["lr"]) == (b["step"], b["steps"], b["tokens"], b["lr"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5) and b["grad_norm"] == pytest.approx(
            a["grad_norm"], rel=1e-5
        )
    assert ours[-1]["loss"] < 0.9 * ours[0]["loss"]


def test_model_and_tokenizer_equal_the_local_trainers(runs):
    start = tensors(runs[0].parent / "model")
    ours, theirs = (tensors(run / "parity-sft" / "sft" / "model") for run in runs)
    assert max((ours[name] - start[name]).abs().max() for name in ours) > 1e-2, "training moved the weights"
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-5)
    text = "<|im_start|>user\nWhat is 3?<|im_end|>"
    mine, verls = (load_tokenizer(run / "parity-sft" / "sft" / "model") for run in runs)
    assert mine.encode(text) == verls.encode(text) and mine.eos_token_id == verls.eos_token_id


def test_the_run_store_has_each_step_once(runs):
    infos = [RunReader(run / "parity-sft").info for run in runs]
    assert infos[1]["status"] == "finished" and infos[1]["attempts"] == 2 and infos[1]["extra"]["trainer"] == "verl"
    for key in ("steps", "examples", "left_out", "tokens"):
        assert infos[0]["result"][key] == infos[1]["result"][key], key
    assert [line["step"] for line in RunReader(runs[1] / "parity-sft").metrics()] == [*range(1, 21)]
    assert not (runs[1] / "parity-sft" / "verl").exists(), "verl's checkpoints are deleted after the SFT"


def test_rl_starts_from_the_sft_model(runs):
    rl = runs[1] / "parity-rl"
    assert RunReader(rl).info["parent"] == {"run": "parity-sft", "step": None}
    after, before = tensors(rl / "checkpoints" / "step=000001"), tensors(runs[1] / "parity-sft" / "sft" / "model")
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)


def test_the_models_before_and_after_sft_are_evaluated_like_those_of_the_local_pipeline(runs):
    infos = {name: RunReader(runs[1] / f"parity-held-{name}").info for name in ("base", "sft", "rl")}
    parents = [None, {"run": "parity-sft", "step": None}, {"run": "parity-rl", "step": 1}]
    assert [info["parent"] for info in infos.values()] == parents
    assert all(info["status"] == "finished" and info["result"]["n"] == 4 for info in infos.values())
    assert list(phase_table(runs[1], "parity").index) == ["before training", "after SFT", "after RL"]
    assert {f"parity-held-{name}" for name in infos} <= set(results_table(open_runs(runs[1])).model)
