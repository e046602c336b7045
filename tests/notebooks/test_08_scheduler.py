"""Tests of notebook 08, executed on a small step."""

import pytest
from helpers.notebooks import NOTEBOOKS, execute, outputs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    parameters = {"engines": 2, "rollouts": 64, "kv_tokens": 60_000, "mean_tokens": 1000, "grid_engines": 1}
    parameters |= {"plan_recipe": "qwen3_1_7b_one_gpu", "plan_profile": "one_gpu"}
    return execute("08_scheduler.ipynb", tmp_path_factory.mktemp("notebook"), parameters, cwd=NOTEBOOKS, timeout_s=200)


@pytest.mark.soak
def test_every_policy_is_compared_with_the_bound(executed):
    summary = outputs(executed, "lower_bound(script")
    for word in ("turn-barrier", "static", "least-in-flight", "kv", "adaptive", "idle share", "preemptions"):
        assert word in summary
    assert "turn-barrier" in outputs(executed, "makespans(Regime")


def test_figures_are_shown(executed):
    for call in ("plot_gantt(", 'plot_turns(results["adaptive"]', "plot_calibration(", "plot_plan("):
        assert "application/vnd.plotly" in outputs(executed, call)


def test_recorded_calibration_ranks_policies_like_the_simulator(executed):
    assert "pairs ranked differently: none" in outputs(executed, "disagreements(")
