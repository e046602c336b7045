"""Tests of notebook 11, which trains with its own tool and reward."""

from pathlib import Path

import jupytext
import nbformat
import papermill
import pytest

from rstar_lab.analysis import open_runs
from rstar_lab.runs.reader import RunReader

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SMALL = {
    "sft.batch_size": 20,
    "rl.problems_per_step": 2,
    "rl.group_size": 2,
    "rl.max_response_tokens": 80,
    "engine.kind": "transformers",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_notebook_11_trains_with_the_tool_and_the_reward(tmp_path):
    out = tmp_path / "out.ipynb"
    parameters = {"runs_dir": str(tmp_path / "runs"), "examples": 120, "steps": 1, "overrides": SMALL}
    papermill.execute_notebook(
        NOTEBOOKS / "11_own_tools.ipynb", out, parameters=parameters, kernel_name="python3", cwd=str(tmp_path),
        progress_bar=False, start_timeout=300, execution_timeout=700, store_widget_state=False,
    )  # fmt: skip
    cells = nbformat.read(out, as_version=4).cells
    text = "\n".join(str(output) for cell in cells for output in cell.get("outputs", []))
    assert '"name": "price"' in text and "Return the price of a fruit at a market, in coins." in text
    assert "invalid_arguments" in text and "exception" in text
    reader = RunReader(tmp_path / "runs" / "own_tools-rl")
    assert reader.status == "finished" and len(reader.metrics()) == 1
    assert reader.info["recipe"]["rl"]["tools"] == ["my_tools:price"]
    assert (tmp_path / "my_tools.py").exists()


def test_the_last_cell_prints_a_rewarded_rollout(capsys):
    cells = jupytext.read(NOTEBOOKS / "11_own_tools.py").cells
    (cell,) = [cell for cell in cells if "best = runs.trajectories" in cell.source]
    exec(cell.source, {"runs": open_runs(NOTEBOOKS.parent / "tests" / "golden" / "runs", run_ids=["tiny_fast-rl"])})
    printed = capsys.readouterr().out
    assert "assistant | " in printed and "tool      | " in printed
