"""Every notebook and its text say the same, outputs are not kept, and papermill finds one cell of parameters."""

from pathlib import Path

import jupytext
import pytest

TEXTS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.py"))


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_the_pair_is_in_step_and_without_outputs(text):
    cells, notebook = jupytext.read(text).cells, jupytext.read(text.with_suffix(".ipynb"))
    assert [(cell.cell_type, cell.source) for cell in cells] == [
        (cell.cell_type, cell.source) for cell in notebook.cells
    ]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells) == 1


def test_no_notebook_is_without_its_text():
    assert {path.stem for path in TEXTS[0].parent.glob("*.ipynb")} == {path.stem for path in TEXTS}
