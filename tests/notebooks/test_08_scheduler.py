"""Notebooks 08 and 18, executed on the golden run."""

import pytest
from helpers.notebooks import GOLDEN, NOTEBOOKS, execute, outputs

pytestmark = pytest.mark.slow


def test_the_scheduler_notebook_shows_a_step_and_a_plan(tmp_path):
    parameters = {"runs_dir": str(GOLDEN), "plan_recipe": "qwen3_1_7b_one_gpu", "plan_profile": "one_gpu"}
    executed = execute("08_scheduler.ipynb", tmp_path, parameters, cwd=NOTEBOOKS, timeout_s=200)
    assert "of tiny_fast-rl" in outputs(executed, "trained = ")
    assert "application/vnd.plotly" in outputs(executed, "plot_timeline(")
    assert "turn-barrier" in outputs(executed, "scheduler-calibration.json")
    assert "recommended" in outputs(executed, '"plan"')


def test_the_paper_notebook_shows_the_published_rows_beside_the_runs(tmp_path):
    executed = execute("18_paper.ipynb", tmp_path, {"runs_dir": str(GOLDEN)}, cwd=NOTEBOOKS, timeout_s=200)
    table = outputs(executed, "results_table(opened).set_index")
    assert "Claude-Opus-4.0" in table and "tiny_fast-eval-rl" in table
    assert "GPQA-Diamond" in outputs(executed, "general")
    assert "application/vnd.plotly" in outputs(executed, 'figures.get("training")')
