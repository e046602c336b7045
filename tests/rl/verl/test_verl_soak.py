"""Tests of verl's real trainer with several stages, a hung step and a killed engine. Part of `make test-all`."""

import json
import os
import signal
import subprocess
import sys
import time

import pyarrow.dataset as ds
import pytest
import torch
import yaml
from helpers.vllm_servers import engines_of
from safetensors.torch import load_file

from benchmarks.verl_parity import RUN, compare, prepare, start_verl, train_locally, train_with_verl
from rstar_lab.common.errors import UserError
from rstar_lab.hardware.local_ray import LocalRay
from rstar_lab.runs.reader import RunReader

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def with_stages(recipe, *stages):
    """Return the recipe with its stage repeated for each of `stages`, which override keys of it."""
    content = yaml.safe_load(recipe.read_text())
    (only,) = content["stages"]
    content["stages"] = [only | {"name": f"s{number}"} | stage for number, stage in enumerate(stages)]
    recipe.write_text(yaml.safe_dump(content))
    return recipe


def test_stages_end_at_the_same_steps_as_in_the_local_trainer(tmp_path):
    recipe = with_stages(
        prepare(tmp_path, retire_from=0.6),
        {"steps": 4, "limits": {"max_response_tokens": 300}, "hand_off": {"window": 1, "truncation_plateau": 1.0}},
        {"steps": 1, "lr": 1e-4, "method": {"kl_coefficient": 0.1, "loss": "gspo"}, "reset_optimizer": True},
        {"steps": 1, "lr": 5e-4, "method": {"aggregation": "seq-mean-token-sum-norm", "normalise_std": False}},
    )
    ours, theirs = train_locally(recipe, tmp_path / "local"), train_with_verl(recipe, tmp_path / "verl", timeout_s=3000)
    assert compare(ours, theirs).differences == []
    tables = [json.loads((run / "run.json").read_text())["result"]["stages"] for run in (ours, theirs)]
    assert tables[0] == tables[1]
    assert [row["stage"] for row in tables[1]] == ["s0", "s1", "s2"]
    assert tables[1][0]["ended_by"] == "truncation_plateau"
    lines = [RunReader(run).metrics() for run in (ours, theirs)]
    for a, b in zip(*lines, strict=True):
        assert a["retired"] == b["retired"]
        if "reference_kl" in a:
            assert a["reference_kl"] == pytest.approx(b["reference_kl"], rel=1e-3, abs=1e-7)
    for stage in ("s0", "s1", "s2"):
        models = [load_file(run / "stages" / stage / "model.safetensors") for run in (ours, theirs)]
        for name, tensor in models[0].items():
            torch.testing.assert_close(models[1][name].float(), tensor.float(), rtol=0, atol=2e-4)


def test_a_hung_step_ends_with_a_report_of_what_it_waits_for(tmp_path, monkeypatch):
    (tmp_path / "hanging.py").write_text("import time\ndef reward(text, answer):\n    time.sleep(3600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    recipe = prepare(tmp_path, problems_per_step=2, group_size=2, reward="hanging:reward")
    process = start_verl(recipe, tmp_path / "verl", "--watchdog-s", "60")
    try:
        assert process.wait(1800) != 0
    finally:
        process.kill()
    report = json.loads((tmp_path / "verl" / RUN / "watchdog.json").read_text())
    assert report["phase"] == "generation, tools and reward" and report["step"] == 1
    (worker,) = [worker for worker in report["workers"] if worker["waits"]]
    assert worker["waits"]["reward"]["traj_id"].startswith(RUN)
    info = json.loads((tmp_path / "verl" / RUN / "run.json").read_text())
    assert info["status"] == "failed" and "reward on " in info["error"]


def workers_of(folder):
    return [engine for engine in engines_of(folder) if "rstar_lab.rl.engines.vllm_worker" in engine.cmdline()]


def wait_for_generation(train, folder):
    """Wait until the engine generates again after a pause for the trainer. Returns its process a second later."""
    rested = False
    while True:
        assert train.poll() is None, (folder / "verl.log").read_text(errors="replace")[-3000:]
        if not (engines := workers_of(folder)):
            time.sleep(0.5)
            continue
        engine = engines[0]
        busy = engine.cpu_percent(1.0)
        if rested and busy > 30:  # three engines share two cores
            return engine
        rested |= busy < 5


def test_a_killed_engine_is_replaced_without_losing_rollouts(tmp_path):
    (tmp_path / "guessing.py").write_text("def reward(text, answer):\n    return float(len(text) % 2)\n")
    recipe = prepare(tmp_path, problems_per_step=4, group_size=4, reward="guessing:reward")
    command = [sys.executable, "-m", "rstar_lab.rl.verl.train", recipe, "--profile", "laptop", "--runs-dir", tmp_path]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with (tmp_path / "verl.log").open("ab") as log:
        train = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        first = wait_for_generation(train, tmp_path)
        first.kill()
        while not any(engine.pid != first.pid for engine in workers_of(tmp_path)):
            assert train.poll() is None, "the training ended before an engine started"
            time.sleep(0.1)
        assert train.wait(1800) == 0, (tmp_path / "verl.log").read_text(errors="replace")[-3000:]
    finally:
        if train.poll() is None:
            os.killpg(train.pid, signal.SIGKILL)
    rows = ds.dataset(tmp_path / RUN / "trajectories", partitioning=None).to_table().to_pandas()
    assert rows.groupby("step").size().to_dict() == {1: 32, 2: 32} and rows["traj_id"].is_unique
    assert "engine_error" not in set(rows["stop_reason"]) and (rows["response_tokens"] > 0).all()
    assert all(line["kept"] > 0 for line in RunReader(tmp_path / RUN).metrics())


def test_a_killed_server_of_three_is_restarted_at_the_next_weight_sync(tmp_path, monkeypatch):
    (tmp_path / "guessing.py").write_text("def reward(text, answer):\n    return float(len(text) % 2)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    recipe = prepare(tmp_path, problems_per_step=6, group_size=4, reward="guessing:reward")
    command = [sys.executable, "-m", "rstar_lab.rl.verl.train", recipe, "--profile", "laptop", "--runs-dir", tmp_path]
    command += ["--set", "verl.trainer.n_gpus_per_node=3", "--set", "engine.kv_cache_gb=0.25"]
    with LocalRay(cpus=20, gpus=3, dashboard=False), (tmp_path / "verl.log").open("ab") as log:
        train = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for_generation(train, tmp_path)
            servers = [engine.parent() for engine in workers_of(tmp_path)]  # the Ray actors
            assert len(servers) == 3
            servers[0].kill()
            assert train.wait(2400) == 0, (tmp_path / "verl.log").read_text(errors="replace")[-3000:]
        finally:
            if train.poll() is None:
                os.killpg(train.pid, signal.SIGKILL)
    rows = ds.dataset(tmp_path / RUN / "trajectories", partitioning=None).to_table().to_pandas()
    assert rows.groupby("step").size().to_dict() == {1: 48, 2: 48} and rows["traj_id"].is_unique
    assert "engine_error" not in set(rows["stop_reason"]) and (rows["response_tokens"] > 0).all()
    assert [line["scheduler_alive"] for line in RunReader(tmp_path / RUN).metrics()] == [2, 3]
    assert len(list((tmp_path / RUN).glob("vllm-*.log"))) == 3


def test_a_rollout_that_raises_ends_the_run_with_its_error(tmp_path, monkeypatch):
    recipe = prepare(tmp_path)
    environment = os.environ | {"RSTAR_LAB_SANDBOX_TOKEN": "right" * 8}
    command = [sys.executable, "-m", "rstar_lab.cli", "sandbox", "serve", "--port", "0", "--workers", "1"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as service:
        try:
            url = next(word for line in service.stdout for word in line.split() if word.startswith("http://"))
            content = yaml.safe_load(recipe.read_text())
            content["sandbox"]["url"] = url
            recipe.write_text(yaml.safe_dump(content))
            monkeypatch.setenv("RSTAR_LAB_SANDBOX_TOKEN", "wrong" * 8)
            with pytest.raises(UserError, match="exited with code"):
                train_with_verl(recipe, tmp_path / "verl")
        finally:
            service.terminate()
    errors = [line for line in (tmp_path / "verl" / "verl.log").read_text().splitlines() if line.startswith("error: ")]
    assert errors and all("step 1: rollout of problem p" in line and "wrong token" in line for line in errors)
    assert RunReader(tmp_path / "verl" / "parity-rl").metrics() == [], "no step without its failed rollouts"
