"""Tests of notebook 12: with its defaults, and with a small grid that it trains itself."""

import pytest
from helpers.notebooks import NOTEBOOKS, execute, outputs

pytestmark = pytest.mark.slow


def test_recorded_curves_are_shown_with_the_defaults(tmp_path):
    executed = execute("12_async.ipynb", tmp_path, cwd=NOTEBOOKS)
    assert "pass@1 at equal trained tokens" in outputs(executed, "learning_table(curves)")
    for call in ('plot_learning(curves, "tokens")', 'plot_learning(curves, "seconds")'):
        assert "application/vnd.plotly" in outputs(executed, call)


@pytest.mark.soak
@pytest.mark.timeout(3600)  # eight runs
def test_a_small_grid_is_trained_and_compared(tmp_path):
    small = {"sft.problems.synthetic.count": 300, "evaluate.sets.held_out.synthetic.count": 8, "rl.problems_per_step": 4}
    small |= {"engine.kind": "transformers"}  # vLLM takes longer to start than the rest of a run
    parameters = {"runs_dir": str(tmp_path / "runs"), "seeds": [0], "steps": 3, "train": True, "overrides": small}
    executed = execute("12_async.ipynb", tmp_path, parameters, cwd=NOTEBOOKS, timeout_s=1500)
    assert "one step off" in outputs(executed, "learning_table(curves)")
    assert "application/vnd.plotly" in outputs(executed, "plot_staleness(")
