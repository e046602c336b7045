"""Test of notebook 04, which evaluates a model and compares it with a stored evaluation."""

import json
import shutil
from pathlib import Path

import nbformat
import papermill
import pytest

from rstar_lab.runs.reader import RunReader

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "04_evaluate.ipynb"
GOLDEN = ROOT / "tests" / "golden" / "runs" / "tiny_fast-eval-rl"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_notebook_04_evaluates_a_model_and_compares_it(tmp_path):
    from helpers.memorized_model import make_memorized_model

    make_memorized_model(tmp_path / "memorized_model")
    shutil.copytree(GOLDEN, tmp_path / "runs" / GOLDEN.name)
    rows = RunReader(GOLDEN).read("transcripts").to_pylist()
    problem_of = {row["traj_id"]: row["problem_id"] for row in RunReader(GOLDEN).read("trajectories").to_pylist()}
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
        "evaluations": [GOLDEN.name],
    }
    out = tmp_path / "out.ipynb"
    papermill.execute_notebook(
        NOTEBOOK, out, parameters=parameters, kernel_name="python3", cwd=str(tmp_path), progress_bar=False,
        start_timeout=200, execution_timeout=500, store_widget_state=False,
    )  # fmt: skip
    (made,) = [path for path in (tmp_path / "runs").iterdir() if path.name.startswith("evaluate-problems-")]
    reader = RunReader(made)
    assert reader.status == "finished" and reader.info["result"]["n"] == 12
    cells = nbformat.read(out, as_version=4).cells

    def outputs(word: str) -> str:
        (cell,) = [cell for cell in cells if cell.cell_type == "code" and word in cell.source]
        return str(cell.outputs)

    assert made.name in outputs("measure(runs") and GOLDEN.name in outputs("measure(runs")
    assert "application/vnd" in outputs("plot_pass_at_k(runs")
    table = outputs("problem_table(open_runs")
    assert "pass_rate" in table and f"[{len(problems) + 6} rows" in table
    assert "maj@2" in outputs("measure(runs")
    card = outputs("compare(open_runs")
    assert made.name in card and GOLDEN.name in card
    assert [cell for cell in cells if cell.cell_type == "code"][-1].outputs
