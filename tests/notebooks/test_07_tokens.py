"""Tests of notebook 07 on the golden runs."""

from pathlib import Path

import nbformat
import papermill
import pytest

ROOT = Path(__file__).parents[2]
HERE = ROOT / "notebooks"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    out = tmp_path_factory.mktemp("tokens") / "out.ipynb"
    papermill.execute_notebook(
        HERE / "07_tokens.ipynb",
        out,
        parameters={
            "runs_dir": str(ROOT / "tests" / "golden" / "runs"),
            "limit": 100,
            "words": ["that failed", "guess"],
        },
        cwd=out.parent,
        progress_bar=False,
        execution_timeout=250,
        start_timeout=250,
    )
    return nbformat.read(out, as_version=4)


def outputs(notebook, source):
    """Return the output of the cell whose source starts with `source`."""
    (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.startswith(source))
    return " ".join(output.get("text", "") + str(output.get("data", {})) for output in cell.outputs)


def test_figures_and_tables_are_readable_without_a_kernel(executed):
    for source in ("third = ", "plot_token_kinds(", "plot_high_entropy_words("):
        assert "application/vnd.plotly" in outputs(executed, source)
    assert "after error" in outputs(executed, "token_kinds(")
    assert outputs(executed, "excerpts(").count("»") >= 12  # three of each kind, not truncated
    assert "tiny_fast-rl" in outputs(executed, "import pandas")
    assert "that" in outputs(executed, "word_list(")
    assert "uses_before" in outputs(executed, "early = ")


def test_given_words_are_counted(executed):
    assert "per_trajectory" in outputs(executed, "count_words(")
