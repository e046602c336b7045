"""Tests of notebook 01, executed with a small load."""

import pytest
from helpers.notebooks import NOTEBOOKS, execute, outputs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    parameters = {"calls": 50, "in_flight": 8, "time_limit_s": 1.0}
    return execute("01_sandbox.ipynb", tmp_path_factory.mktemp("notebook"), parameters, cwd=NOTEBOOKS, timeout_s=200)


def test_cells_show_the_described_output(executed):
    assert "hello world" in outputs(executed, "stdin=")
    assert "line 2, in f" in outputs(executed, "def f(x)")
    assert "(x - 3)*(x - 2)" in outputs(executed, "sp.factor")
    assert "still here" in outputs(executed, "still here")
    assert " 42" in outputs(executed, "SandboxClient(service")


def test_attacks_have_outcomes_of_the_model(executed):
    table = outputs(executed, "attacks = {")
    for outcome in ("timeout", "output_limit", "syntax_error", "exception"):
        assert outcome in table
    assert "root:" not in table


def test_load_figures_and_core_counts_are_shown(executed):
    assert "application/vnd.plotly" in outputs(executed, "asyncio.gather(")
    assert "CPU ms per call" in outputs(executed, "cpu_ms = ")
