"""Tests of notebook 01, executed with a small load."""

from pathlib import Path

import nbformat
import papermill
import pytest

HERE = Path(__file__).parents[2] / "notebooks"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    out = tmp_path_factory.mktemp("notebook") / "out.ipynb"
    papermill.execute_notebook(
        HERE / "01_sandbox.ipynb",
        out,
        parameters={"calls": 50, "in_flight": 8, "time_limit_s": 1.0},
        cwd=HERE,
        progress_bar=False,
        execution_timeout=200,
        start_timeout=200,
    )
    return nbformat.read(out, as_version=4)


def outputs(notebook, word):
    """Return the output of the cells whose source contains `word`, as text."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and word in cell.source]
    assert cells, word
    return " ".join(output.get("text", "") + str(output.get("data", {})) for cell in cells for output in cell.outputs)


def test_cells_show_the_described_output(executed):
    assert "hello world" in outputs(executed, "stdin=")
    assert "line 2, in f" in outputs(executed, "def f(x)")
    assert "(x - 3)*(x - 2)" in outputs(executed, "sp.factor")
    assert "still here" in outputs(executed, "still here")
    assert " 42" in outputs(executed, "SandboxClient(service")


def test_attacks_have_outcomes_of_the_model(executed):
    table = outputs(executed, "attacks = {")
    for outcome in ("timeout", "output_limit", "syntax_error", "exception"):
        assert outcome in table
    assert "root:" not in table


def test_load_figures_and_core_counts_are_shown(executed):
    assert "application/vnd.plotly" in outputs(executed, "plot_outcomes(samples)")
    assert "application/vnd.plotly" in outputs(executed, "run_load(")
    assert "CPU ms per call" in outputs(executed, "cores_for_burst")
