"""Tests that each notebook equals its .py file, stores no outputs and has one parameter cell for papermill."""

import re
from pathlib import Path

import jupytext
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
TEXTS = sorted((NOTEBOOKS / "py").glob("*.py"))


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_notebook_equals_its_py_file_and_has_no_outputs(text):
    cells, notebook = jupytext.read(text).cells, jupytext.read(NOTEBOOKS / f"{text.stem}.ipynb")
    assert notebook.metadata["jupytext"]["formats"] == "ipynb,py//py:percent"
    assert [(cell.cell_type, cell.source, cell.metadata) for cell in cells] == [
        (cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells
    ]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells) == 1


def test_no_cell_of_a_notebook_is_folded():
    """A folded cell hides that it runs, and errors point at code that nobody sees."""
    folded = {path.stem for path in TEXTS if "source_hidden" in path.read_text()}
    assert not folded


def test_notebooks_import_nothing_of_the_benchmarks():
    assert not [path.stem for path in TEXTS if re.search(r"^(from|import) benchmarks|load_benchmark", path.read_text(), re.M)]


def test_every_notebook_has_a_py_file_in_the_folder_py():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {path.stem for path in TEXTS}
    assert not list(NOTEBOOKS.glob("*.py")), "the file browser would list each notebook twice"


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_a_notebook_says_what_one_learns_and_ends_with_two_next_steps(text):
    first, *_, last = jupytext.read(text).cells
    assert "**You learn** " in first.source and "**Time**: " in " ".join(first.source.split())
    steps = [line for line in last.source.splitlines() if line.startswith("- ")]
    assert last.cell_type == "markdown" and last.source.startswith("## Next steps") and len(steps) == 2
    for name in re.findall(r"\]\((\d\d_\w+)\.ipynb\)", last.source):
        assert (NOTEBOOKS / f"{name}.ipynb").exists(), name
    assert not re.search(r"`\d\d_\w+`", last.source), "next steps are links"


def test_every_notebook_is_in_one_of_the_four_paths():
    names = {path.stem for path in TEXTS}
    start = jupytext.read(NOTEBOOKS / "00_quickstart.ipynb").cells[-1].source
    table = [line for line in start.splitlines() if line.startswith("| **")]
    assert sorted(re.findall(r"\[(\d\d_\w+)\]", "".join(table))) == sorted(names) and len(table) == 4
    page = (NOTEBOOKS.parent / "docs" / "tutorials.md").read_text()
    assert sorted(re.findall(r"^\| \[(\d\d_\w+)\]", page, re.MULTILINE)) == sorted(names)
    read_me = (NOTEBOOKS / "README.md").read_text().splitlines()  # in the file browser
    links = [re.findall(r"\[(\d\d_\w+)\]\(\1\.ipynb\)", line) for line in read_me if line.startswith("| **")]
    assert links == [re.findall(r"\[(\d\d_\w+)\]", line) for line in table]
