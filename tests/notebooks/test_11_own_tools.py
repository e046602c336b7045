"""Tests of notebook 11, which trains with its own tool and reward."""

import jupytext
import pytest
from helpers.notebooks import GOLDEN, NOTEBOOKS, execute, outputs

from rstar_lab.analysis import open_runs
from rstar_lab.runs.reader import RunReader

SMALL = {
    "sft.batch_size": 20,
    "rl.problems_per_step": 2,
    "rl.group_size": 2,
    "rl.limits.max_response_tokens": 80,
    "engine.kind": "transformers",
}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_notebook_11_trains_with_the_tool_and_the_reward(tmp_path):
    parameters = {"runs_dir": str(tmp_path / "runs"), "examples": 120, "steps": 1, "overrides": SMALL}
    text = outputs(execute("11_own_tools.ipynb", tmp_path, parameters, timeout_s=700))
    assert '"name": "price"' in text and "Return the price of a fruit at a market, in coins." in text
    assert "invalid_arguments" in text and "exception" in text
    assert "tests_passed" in text and "wrong from 2 on" in text, "hidden test cases"
    reader = RunReader(tmp_path / "runs" / "own_tools-rl")
    assert reader.status == "finished" and len(reader.metrics()) == 1
    assert reader.info["recipe"].get("rl.tools") == ["my_tools:price"]
    assert (tmp_path / "my_tools.py").exists()


def test_the_last_cell_prints_a_rewarded_rollout(capsys):
    cells = jupytext.read(NOTEBOOKS / "11_own_tools.ipynb").cells
    (cell,) = [cell for cell in cells if "best = runs.trajectories" in cell.source]
    exec(cell.source, {"runs": open_runs(GOLDEN, run_ids=["tiny_fast-rl"])})
    printed = capsys.readouterr().out
    assert "assistant | " in printed and "tool      | " in printed
