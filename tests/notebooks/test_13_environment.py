"""Tests of notebook 13, which trains in an environment with a database."""

import pytest
from helpers.notebooks import execute, outputs

from rstar_lab.runs.reader import RunReader

SMALL = {
    "sft.batch_size": 20,
    "rl.problems_per_step": 2,
    "rl.group_size": 2,
    "rl.limits.max_response_tokens": 120,
    "engine.kind": "transformers",
}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_notebook_13_trains_in_the_environment(tmp_path):
    parameters = {"runs_dir": str(tmp_path / "runs"), "examples": 120, "steps": 1, "overrides": SMALL}
    text = outputs(execute("13_environment.ipynb", tmp_path, parameters, timeout_s=700))
    assert "What does a " in text and "failed_queries" in text
    reader = RunReader(tmp_path / "runs" / "environment-rl")
    assert reader.status == "finished"
    (line,) = reader.metrics()
    assert line["env/shop/rollouts"] == 8 and "metrics/failed_queries" in line
    table = reader.read("trajectories")
    assert set(table["environment"].to_pylist()) == {"shop"}
    assert "environment_error" not in set(table["stop_reason"].to_pylist())
