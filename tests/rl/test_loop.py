"""The training loop of one's own and the example examples/minimal_rl.py, with a trained tiny model and vLLM."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.rl import Streams, TrainingLoop, group_advantages
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.resolved import read_stage_problems
from rstar_lab.rl.session import PROBE
from rstar_lab.runs.reader import RunReader

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "minimal_rl.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder of runs with the SFT of tiny_fast."""
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "rstar_lab.cli", "sft", "tiny_fast", "--runs-dir", str(folder)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return folder


@pytest.mark.soak
def test_a_loop_samples_trains_evaluates_and_stores_every_step(runs):
    recipe = load_recipe("tiny_fast")
    problems = read_stage_problems(recipe, recipe.stages[0])
    model = runs / "tiny_fast-sft" / "sft" / "model"
    with TrainingLoop("tiny_fast", model, name="mine", runs_dir=runs) as loop:
        assert loop._engines.probe == loop._training.codec.prompt_ids(PROBE)
        before = loop.evaluate(loop.held_out["held_out"][:8], samples=2)
        assert before["n"] == 16 and len(before["pass1"]) == 3
        rollouts = loop.sample(problems[:6], n=16)
        assert len(rollouts) == 96 and len({t.group_id for t in rollouts}) == 6
        kept = loop.resample(rollouts)
        assert len(kept) == 48 and {t.traj_id for t in kept} < {t.traj_id for t in rollouts}
        metrics = loop.update(kept, group_advantages([t.reward for t in kept], [t.group_id for t in kept]))
        assert metrics["step"] == 1 and metrics["kept"] == 48 and metrics["grad_norm"] > 0
        # Own rewards, and streams: shorter is better, and only the first half of every rollout is trained on.
        shorter = loop.score(loop.sample(problems[6:8], n=4), lambda t: -len(t.response_ids) / 96)
        streams = []
        for t in shorter:
            first_T = np.arange(len(t.response_ids)) < len(t.response_ids) / 2
            streams.append(Streams(t.reward, loss_weight_T=first_T))
        tokens = loop.update(shorter, streams)["tokens"]
        assert 0 < tokens < sum(t.model_tokens for t in shorter)
        folder = loop.save(runs / "saved")
        with pytest.raises(UserError, match="advantages returned"):
            loop.update(shorter, [1.0])
    assert (folder / "model.safetensors").exists()
    lines = RunReader(loop.run_dir).metrics()
    assert [line["step"] for line in lines] == [1, 2] and lines[0]["rollouts"] == 96
    assert RunReader(loop.run_dir).read("trajectories").num_rows == 104
    assert lines[1]["reward"] == pytest.approx(np.mean([t.reward for t in shorter]))
    with pytest.raises(UserError, match="has 2 steps already: choose another name"):
        TrainingLoop("tiny_fast", model, name="mine", runs_dir=runs).__enter__()


@pytest.mark.soak  # a minute and a half of CPU time
def test_the_minimal_example_trains_a_better_model(runs):
    assert len(EXAMPLE.read_text().splitlines()) <= 150
    command = [sys.executable, str(EXAMPLE), "--runs-dir", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = map(float, re.search(r"pass@1: ([\d.]+) before, ([\d.]+) after 7 steps", done.stdout).groups())
    assert after > before + 0.1


@pytest.mark.soak
def test_rejection_sampling_fine_tuning_takes_two_commands(runs, tmp_path):
    model = runs / "tiny_fast-sft" / "sft" / "model"
    with TrainingLoop("tiny_fast", model, name="sampled", runs_dir=runs) as loop:
        rollouts = loop.sample(loop.problems[:16], n=8)
        loop.update(rollouts, group_advantages([t.reward for t in rollouts], [t.group_id for t in rollouts]))
    data, command = tmp_path / "clean.jsonl", [sys.executable, "-m", "rstar_lab.cli"]
    export = ["export", "sampled-loop", "--format", "sft", "--where", "reward > 0 AND errors = 0", "--out", data]
    sft = ["sft", "tiny_fast", "--set", f"model={model}", "--set", "sft.problems=null", "--set", "name=rft"]
    sft += ["--set", f"sft.conversations=[{{file: {data}}}]", "--set", "sft.lr=0.0001", "--set", "sft.muon_lr=0.001"]
    for arguments in (export, sft):
        done = subprocess.run(
            [*command, *map(str, arguments), "--runs-dir", str(runs)], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
    assert (
        len(data.read_text().splitlines()) > 3 and (runs / "rft-sft" / "sft" / "model" / "model.safetensors").exists()
    )
    lines = (runs / "rft-sft" / "sft" / "metrics.jsonl").read_text().splitlines()
    assert lines and max(json.loads(line)["loss"] for line in lines) < 2  # what the model sampled is likely for it
