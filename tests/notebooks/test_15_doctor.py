"""Test of notebook 15 on stored runs: the fault of a broken run is named, and the run after the remedy is healthy."""

import json
import shutil

import pytest
from helpers.notebooks import GOLDEN, execute, outputs


@pytest.mark.slow
def test_notebook_15_names_the_fault_and_compares_the_curves(tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(GOLDEN / "tiny_fast-rl", broken)
    info = json.loads((broken / "run.json").read_text()) | {"run_id": "broken"}
    (broken / "run.json").write_text(json.dumps(info))
    lines = [json.loads(line) for line in (broken / "metrics.jsonl").read_text().splitlines()]
    still = {"kl_k3": 1e-12, "ratio_max": 1.0}
    (broken / "metrics.jsonl").write_text("".join(json.dumps(line | still) + "\n" for line in lines))
    parameters = {"broken": str(broken), "fixed": str(GOLDEN / "tiny_fast-rl"), "runs_dir": str(tmp_path)}
    notebook = execute("15_doctor.ipynb", tmp_path, parameters, timeout_s=250)
    assert "updates change nothing: the policy moves by" in outputs(notebook, "for finding in")
    assert "No fault was found by" in outputs(notebook, "after = doctor(")
    assert "rl-page" in outputs(notebook, "named = [")
    assert "application/vnd.plotly" in outputs(notebook, "plot_curves(")
