"""Tests of `bench store` on a small store."""

import pytest

from benchmarks.store import bench
from benchmarks.synthetic_store import LONG_TOKENS, Size, make_store
from rstar_lab.analysis.runs import open_runs


@pytest.mark.slow
def test_bench_lines_have_equal_results_on_both_sides():
    lines = list(bench(size=Size(runs=8, steps=25, rollouts=200, transcripts=4, tokens=100)))
    names = ["make", "curves", "page", "page_by_length", "transcript", "search", "search_first", "open", "memory"]
    assert [line["name"] for line in lines] == names
    for line in lines:
        assert set(line) == {"name", "value", "unit", "against", "ratio", "n"} and line["value"] > 0
    assert lines[1]["n"] == 40_000
    assert all(line["ratio"] == pytest.approx(line["against"] / line["value"]) for line in lines if line["against"])


def test_the_synthetic_store_is_a_readable_run_store(tmp_path):
    make_store(tmp_path, Size(runs=1, steps=3, rollouts=32, written_steps=2, transcripts=3, tokens=60))
    runs = open_runs(tmp_path)
    assert runs.count() == 96 and len(runs.steps()) == 3
    assert len(runs.tokens("run000/000001/00000")) == LONG_TOKENS
    assert len(runs.tokens("run000/000002/00002")) == 60
    rows = runs.trajectories()
    assert rows.traj_id.is_unique and (rows.errors <= rows.calls).all()
    assert rows.outcomes.map(lambda kinds: list(kinds).count("exception")).equals(rows.errors.astype("int64"))
