"""The package structure: import contracts (pyproject.toml), formatting and types."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_import_contracts_are_kept():
    assert "0 broken" in run(str(Path(sys.executable).parent / "lint-imports"), "--no-cache")


def test_code_is_clean():
    run(sys.executable, "-m", "ruff", "check", ".")
    run(sys.executable, "-m", "ruff", "format", "--check", ".")


@pytest.mark.slow
def test_types_hold():
    run(sys.executable, "-m", "mypy")
