"""Tests that a killed and resumed run has the rollouts, metrics and weights of an uninterrupted run, bit for bit."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.scripted_training import metrics_without_times
from safetensors.torch import load_file

from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.schema import TRANSCRIPTS

SCRIPT = Path(__file__).parents[2] / "helpers" / "scored_run.py"


def start(runs_dir: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(runs_dir)], stdout=subprocess.DEVNULL, stderr=(runs_dir / "log").open("ab")
    )


def finish(runs_dir: Path) -> None:
    process = start(runs_dir)
    assert process.wait(timeout=280) == 0, (runs_dir / "log").read_text()[-3000:]


def result(runs_dir: Path):
    reader = RunReader(runs_dir / "scored-rl")
    columns = [name for name in TRANSCRIPTS.names if name != "messages"]  # messages contain times
    transcripts = reader.read("transcripts", columns=columns).to_pylist()
    kept = reader.read(
        "trajectories", columns=["traj_id", "kept", "advantage", "reward", "trainer_log_prob"]
    ).to_pylist()
    files = load_file(reader.checkpoints()[5] / "model.safetensors")
    weights = {name: tensor.numpy().tobytes() for name, tensor in files.items()}
    return metrics_without_times(reader.run_dir), repr(transcripts), repr(kept), weights


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    runs_dir = tmp_path_factory.mktemp("uninterrupted")
    finish(runs_dir)
    return runs_dir


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_after_a_checkpoint_resumes_identically(uninterrupted, tmp_path):
    metrics, *_ = expected = result(uninterrupted)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    assert [line["stage"] for line in metrics] == ["one"] * 3 + ["two"] * 2
    assert all(line["mismatch"] < 1e-4 for line in metrics if line["kept"])
    assert sum(line["kept"] for line in metrics) > 20, "nothing was trained"

    process = start(tmp_path)
    lines = tmp_path / "scored-rl" / "metrics.jsonl"
    while process.poll() is None and not (lines.exists() and lines.read_text().count("\n") >= 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 3 <= len(RunReader(tmp_path / "scored-rl").metrics()) < 5
    assert RunReader(tmp_path / "scored-rl").status == "interrupted"
    finish(tmp_path)
    again = result(tmp_path)
    assert again[0] == expected[0]
    assert again[1:] == expected[1:]
    info = json.loads((tmp_path / "scored-rl" / "run.json").read_text())
    assert (info["attempts"], info["status"]) == (2, "finished")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_run_killed_at_random_times_resumes_identically(uninterrupted, tmp_path):
    rng = random.Random(0)
    for _ in range(8):
        process = start(tmp_path)
        try:
            process.wait(timeout=rng.uniform(5, 40))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    finish(tmp_path)
    assert result(tmp_path) == result(uninterrupted)
    shutil.rmtree(tmp_path)
