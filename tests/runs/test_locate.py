"""Tests of how the folder of runs is found: from the root, from notebooks/, and by the environment."""

from pathlib import Path

import pytest

from rstar_lab.runs import RunStoreError, find_runs_dir


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RSTAR_LAB_RUNS", raising=False)
    (tmp_path / "notebooks" / "deep").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("start", [".", "notebooks", "notebooks/deep"])
def test_the_nearest_parent_with_a_runs_folder_is_used(project, monkeypatch, start):
    (project / "runs" / "one").mkdir(parents=True)
    (project / "runs" / "one" / "run.json").write_text("{}")
    monkeypatch.chdir(project / start)
    assert find_runs_dir() == project / "runs"


@pytest.mark.parametrize("start", [".", "notebooks"])
def test_without_runs_the_folder_beside_the_notebooks_is_used(project, monkeypatch, start):
    monkeypatch.chdir(project / start)
    assert find_runs_dir() == project / "runs"


def test_an_argument_and_the_environment_take_precedence(project, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.setenv("RSTAR_LAB_RUNS", str(project / "elsewhere"))
    assert find_runs_dir() == project / "elsewhere"
    assert find_runs_dir("mine") == project / "mine"


def test_a_required_run_that_is_missing_is_an_error_with_the_command(project, monkeypatch):
    monkeypatch.chdir(project / "notebooks")
    with pytest.raises(RunStoreError, match=f"there is no run in {project}/runs: run `make demo`"):
        find_runs_dir(required=True)
    (project / "runs" / "one").mkdir(parents=True)
    (project / "runs" / "one" / "run.json").write_text("{}")
    assert find_runs_dir(required=True) == project / "runs"
    assert find_runs_dir(project / "runs" / "one", required=True) == project / "runs" / "one"
