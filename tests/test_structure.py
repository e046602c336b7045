"""Tests of the package structure: import contracts (pyproject.toml), file sizes, formatting and types."""

import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_import_contracts_are_kept():
    assert "0 broken" in run(str(Path(sys.executable).parent / "lint-imports"), "--no-cache")


def test_architecture_page_lists_the_layers_of_the_import_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("| layer, from the top | contents |\n|---|---|\n")[1].split("\n\n")[0]
    listed = [re.findall(r"`(\w+)`", line.split(" | ")[0]) for line in table.splitlines()]
    assert listed == [[name.strip() for name in layer.split(":")] for layer in layers]


def test_rl_has_at_most_18_modules_beside_its_packages():
    modules = [path.name for path in (ROOT / "rstar_lab" / "rl").glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= 18, modules


def test_scripts_of_the_inspector_have_at_most_600_lines():
    for path in (ROOT / "rstar_lab" / "analysis" / "inspector" / "static").iterdir():
        assert len(path.read_text().splitlines()) <= 600, path.name


def test_python_files_have_at_most_600_lines():
    files = [path for folder in ("rstar_lab", "benchmarks", "tests", "docs") for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in files if len(path.read_text().splitlines()) > 600] == []


def test_names_of_test_modules_are_unique():
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == [], "pytest cannot import two modules of one name"


def test_ruff_finds_no_problem():
    run(sys.executable, "-m", "ruff", "check", ".")
    run(sys.executable, "-m", "ruff", "format", "--check", ".")


@pytest.mark.slow
def test_mypy_finds_no_error():
    run(sys.executable, "-m", "mypy")
