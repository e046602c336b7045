"""Tests of notebook 07 on the golden runs."""

import pytest
from helpers.notebooks import GOLDEN, execute, outputs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    parameters = {"runs_dir": str(GOLDEN), "limit": 100, "words": ["that failed", "guess"]}
    return execute("07_tokens.ipynb", tmp_path_factory.mktemp("tokens"), parameters, timeout_s=250)


def test_figures_and_tables_are_readable_without_a_kernel(executed):
    for source in ("third = ", "plot_token_kinds(", "plot_high_entropy_words("):
        assert "application/vnd.plotly" in outputs(executed, source)
    assert "after error" in outputs(executed, "token_kinds(")
    assert outputs(executed, "excerpts(").count("»") >= 12  # three of each kind, not truncated
    assert "tiny_fast-rl" in outputs(executed, "import pandas")
    assert "that" in outputs(executed, "word_list(")


def test_tool_use_is_shown(executed):
    assert "application/vnd.plotly" in outputs(executed, "plot_tool_use(")


def test_given_words_are_counted(executed):
    assert "per_trajectory" in outputs(executed, "count_words(")
