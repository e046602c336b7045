"""Tests that the notebooks which show the demo's runs work with their defaults from any folder of the project."""

import shutil
from pathlib import Path

import papermill
import pytest
from helpers.notebooks import NOTEBOOKS, execute, outputs

NAMES = ("00_quickstart", "04_evaluate", "05_inspect", "07_tokens", "14_counterfactual")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, demo_runs: Path) -> Path:
    """A folder with notebooks/ and the runs of `make demo`."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(NOTEBOOKS, folder / "notebooks")
    shutil.copytree(demo_runs, folder / "runs")
    (folder / "copies" / "mine").mkdir(parents=True)
    return folder


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", ["notebooks", ".", "copies/mine"])
@pytest.mark.parametrize("name", NAMES)
def test_the_demo_is_shown_from_three_folders(project: Path, name: str, place: str, tmp_path: Path):
    notebook = execute(f"{name}.ipynb", tmp_path, cwd=project / place)
    assert "application/vnd.plotly.v1+json" in outputs(notebook)
    assert not [folder for folder in (place, "notebooks", "copies") if folder != "." and (project / folder / "runs").exists()]


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_without_runs_the_error_names_the_command(name: str, tmp_path: Path):
    with pytest.raises(papermill.PapermillExecutionError, match="run `make demo`"):
        execute(f"{name}.ipynb", tmp_path)
