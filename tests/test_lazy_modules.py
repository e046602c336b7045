"""Collecting the tests loads none of the packages that take seconds to import (tests/helpers/lazy_modules.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, pytest
code = pytest.main(["--collect-only", "-qq", "tests"])
print(code.name, {"torch", "transformers", "vllm", "verl", "ray", "inspect_ai", "datasets", "hydra"} & sys.modules.keys())
"""


@pytest.mark.slow
def test_collecting_loads_no_engine():
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "OK set()", done.stdout[-2000:] + done.stderr[-2000:]
