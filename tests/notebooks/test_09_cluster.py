"""Test of notebook 09, executed with a real Ray cluster on this machine."""

import json

import pytest
from helpers.notebooks import NOTEBOOKS, execute, outputs


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_notebook_09_submits_watches_and_stops_jobs_on_ray(tmp_path):
    from benchmarks.verl_parity import prepare

    recipe = prepare(tmp_path / "recipe", steps=1, problems_per_step=2, group_size=2)
    overrides = {"engine.kind": "transformers", "rl.limits.max_response_tokens": 32, "rl.limits.max_turns": 2, "evaluate.sets": {}}
    parameters = {
        "recipe": str(recipe),
        "overrides": overrides,
        "runs_dir": str(tmp_path / "runs"),
        "timeout_s": 700,
    }
    text = outputs(execute("09_cluster.ipynb", tmp_path, parameters, cwd=NOTEBOOKS, timeout_s=800))
    assert "finished  ray  rl  1/1" in text and "stopped  ray" in text, "the board shows both jobs"
    assert "to ray" in text, "submit says what it sends and where"
    run = json.loads((tmp_path / "runs" / "parity-rl" / "run.json").read_text())
    assert run["status"] == "finished"
