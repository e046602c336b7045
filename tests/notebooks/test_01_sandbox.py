"""The notebook runs from top to bottom with a small load, and its pair is in step with it."""

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
    """Text of what the cells whose source holds `word` gave."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and word in cell.source]
    assert cells, word
    return " ".join(output.get("text", "") + str(output.get("data", {})) for cell in cells for output in cell.outputs)


def test_it_tells_what_it_promises(executed):
    assert "hello world" in outputs(executed, "stdin=")
    assert "line 2, in f" in outputs(executed, "def f(x)")
    assert "(x - 3)*(x - 2)" in outputs(executed, "sp.factor")
    assert "still here" in outputs(executed, "still here")
    assert " 42" in outputs(executed, "SandboxClient(service")


def test_every_attack_has_an_outcome_of_the_models(executed):
    table = outputs(executed, "attacks = {")
    for outcome in ("timeout", "output_limit", "syntax_error", "exception"):
        assert outcome in table
    assert "root:" not in table


def test_figures_are_there_and_cores_are_counted(executed):
    assert "application/vnd.plotly" in outputs(executed, "plot_outcomes(samples)")
    assert "application/vnd.plotly" in outputs(executed, "run_load(")
    assert "CPU ms a call" in outputs(executed, "cores_for_burst")
