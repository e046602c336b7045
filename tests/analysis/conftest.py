"""Fixtures of the inspector tests."""

from pathlib import Path

import pytest
from helpers.inspector_runs import write_run

from rstar_lab.analysis.inspector.inspector import Inspector, inspect
from rstar_lab.analysis.inspector.source import Source
from rstar_lab.analysis.runs import open_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    write_run(path, "grpo", seed=1)
    write_run(path, "roc")
    return path


@pytest.fixture(scope="module")
def source(folder: Path) -> Source:
    return Source(open_runs(folder))


@pytest.fixture
def inspector(folder: Path) -> Inspector:
    return inspect(folder)
