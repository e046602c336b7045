"""Tests of notebook 08, executed on a small step."""

from pathlib import Path

import nbformat
import papermill
import pytest

HERE = Path(__file__).parents[2] / "notebooks"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    out = tmp_path_factory.mktemp("notebook") / "out.ipynb"
    small = {"engines": 2, "rollouts": 64, "kv_tokens": 60_000, "mean_tokens": 1000, "grid_engines": 1}
    papermill.execute_notebook(
        HERE / "08_scheduler.ipynb",
        out,
        parameters=small,
        cwd=HERE,
        progress_bar=False,
        execution_timeout=200,
        start_timeout=200,
    )
    return nbformat.read(out, as_version=4)


def outputs(notebook, word):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and word in cell.source]
    assert cells, word
    return " ".join(output.get("text", "") + str(output.get("data", {})) for cell in cells for output in cell.outputs)


def test_every_policy_is_compared_with_the_bound(executed):
    summary = outputs(executed, "lower_bound(script")
    for word in ("turn-barrier", "static", "least-in-flight", "kv", "adaptive", "idle share", "preemptions"):
        assert word in summary
    assert "turn-barrier" in outputs(executed, "makespans(Regime")


def test_figures_are_shown(executed):
    for call in ("plot_gantt(", 'plot_turns(results["adaptive"]', "plot_calibration("):
        assert "application/vnd.plotly" in outputs(executed, call)


def test_recorded_calibration_ranks_policies_like_the_simulator(executed):
    assert "pairs ranked differently: none" in outputs(executed, "disagreements(")
