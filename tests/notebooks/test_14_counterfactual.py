"""Test of notebook 14 on the golden runs."""

import pytest
from helpers.notebooks import GOLDEN, execute, outputs


@pytest.mark.slow
def test_notebook_14_compares_rules_on_stored_steps(tmp_path):
    parameters = {"runs_dir": str(GOLDEN), "steps": [2, 8], "draws": 4}
    notebook = execute("14_counterfactual.ipynb", tmp_path, parameters, timeout_s=250)
    assert "run tiny_fast-rl, steps 2, 8 of 8" in outputs(notebook, "find_runs_dir(")
    assert "application/vnd.plotly" in outputs(notebook, "result = counterfactual(")
    table = outputs(notebook, "shown = [")
    for rule in ("as trained", "paper rule", "released rule", "random", "quotas"):
        assert rule in table
    assert "the run has no checkpoint" in table
    assert "rl-page" in outputs(notebook, "inspect(runs, where")
