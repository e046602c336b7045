"""Benchmarks and recorded results are in the repository only; an installed package says where they are."""

import subprocess
import sys

import pytest

from rstar_lab.common import resources
from rstar_lab.common.errors import UserError
from rstar_lab.common.resources import benchmark_file, load_benchmark


def test_benchmarks_are_found_in_the_repository():
    assert benchmark_file("async.csv").exists()
    assert load_benchmark("published").PUBLISHED


@pytest.mark.slow
def test_a_package_of_the_current_folder_is_not_taken_for_the_benchmarks(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise SystemExit(3)")
    script = "from rstar_lab.common.resources import load_benchmark; load_benchmark('published')"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)


def test_an_installed_package_names_the_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "site-packages" / "rstar_lab")
    with pytest.raises(UserError, match="in the repository only"):
        load_benchmark("trainer")
    with pytest.raises(UserError, match="clone it"):
        benchmark_file("async.csv")
