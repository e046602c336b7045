"""Notebook 17 trains with a loop of its own; with its defaults it runs in any folder."""

import pytest
from helpers.notebooks import SMALL, execute, outputs

from rstar_lab.runs.reader import RunReader


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "parameters", [{}, {"steps": 1, "problems_per_step": 4, "overrides": SMALL}], ids=["defaults", "small"]
)
def test_a_loop_by_hand_trains_and_is_changed(parameters, tmp_path):
    executed = execute("17_own_loop.ipynb", tmp_path, parameters | {"name": "mine"}, timeout_s=900)
    steps = 2 * parameters.get("steps", 4)
    assert f"after {steps} steps" in outputs(executed, "loop.save(")
    assert "application/vnd.plotly" in outputs(executed, "plot_curves(")
    assert "Inspector" in outputs(executed, "inspect(runs, where") and "step 1: reward" in outputs(executed, "train_step()")
    run = RunReader(tmp_path / "runs" / "mine-loop")
    assert [line["step"] for line in run.metrics()] == [*range(1, steps + 1)]
    rewards = run.read("trajectories", ["step", "reward"]).to_pylist()
    assert {row["reward"] for row in rewards if row["step"] == 1} <= {0.0, 1.0}
    assert any(0 < row["reward"] < 1 for row in rewards if row["step"] == steps)
    assert (run.run_dir / "model" / "model.safetensors").exists()
