"""Test of notebook 04, which evaluates a model and compares it with a stored evaluation."""

import json
import shutil

import pytest
from helpers.notebooks import GOLDEN, execute, outputs

from rstar_lab.runs.reader import RunReader

EVALUATION = GOLDEN / "tiny_fast-eval-rl"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_notebook_04_evaluates_a_model_and_compares_it(tmp_path):
    from helpers.memorized_model import make_memorized_model

    make_memorized_model(tmp_path / "memorized_model")
    shutil.copytree(EVALUATION, tmp_path / "runs" / EVALUATION.name)
    rows = RunReader(EVALUATION).read("transcripts").to_pylist()
    problem_of = {row["traj_id"]: row["problem_id"] for row in RunReader(EVALUATION).read("trajectories").to_pylist()}
    problems = {problem_of[row["traj_id"]]: (row["question"], row["truth"]) for row in rows}
    lines = [
        json.dumps({"problem_id": name, "question": question, "answer": truth})
        for name, (question, truth) in list(problems.items())[:6]
    ]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines))
    parameters = {
        "runs_dir": "runs",
        "models": ["memorized_model"],
        "problems": "problems.jsonl",
        "samples": 2,
        "overrides": {"engine.kind": "transformers", "engine.dtype": "float32", "evaluate.max_response_tokens": 60},
        "evaluations": [EVALUATION.name],
    }
    notebook = execute("04_evaluate.ipynb", tmp_path, parameters, timeout_s=500)
    (made,) = [path for path in (tmp_path / "runs").iterdir() if path.name.startswith("evaluate-problems-")]
    reader = RunReader(made)
    assert reader.status == "finished" and reader.info["result"]["n"] == 12

    assert made.name in outputs(notebook, "models_of =") and EVALUATION.name in outputs(notebook, "models_of =")
    models = ("memorized_model", "tiny_fast-rl, step 8")
    assert all(model in outputs(notebook, "measure(runs") for model in models)
    assert "application/vnd" in outputs(notebook, "plot_pass_at_k(runs")
    table = outputs(notebook, "problem_table(open_runs")
    assert "pass_rate" in table and f"[{len(problems) + 6} rows" in table
    assert "maj@2" in outputs(notebook, "measure(runs")
    card = outputs(notebook, "compare(*sides")
    assert all(model in card for model in models)
    assert [cell for cell in notebook.cells if cell.cell_type == "code"][-1].outputs
