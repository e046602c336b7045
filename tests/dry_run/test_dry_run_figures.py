"""Figures of a dry run: their values are those of its rows."""

import pytest

from rstar_lab.dry_run import plot_memory, plot_time
from rstar_lab.dry_run.run import dry_run_rows
from rstar_lab.hardware.profiles import load_profile
from rstar_lab.rl.overrides import load_recipe


@pytest.fixture(scope="module")
def rows():
    recipe = load_recipe("tiny", {"rl.limits.max_response_tokens": 64})
    return list(dry_run_rows(recipe, load_profile("one_gpu")))


def test_memory_is_stacked_by_kind_over_the_phases_of_each_part(rows):
    figure = plot_memory(rows)
    totals = figure.frame.groupby(["part", "phase"]).gb.sum()
    assert set(figure.frame.part) == {"rl", "sft"} and figure.layout.barmode == "stack"
    for row in rows:
        for phase, found in row["phases"].items():
            assert totals[row["dry_run"], phase] == pytest.approx(found["total_gb"], rel=0.01)
    assert {trace.name for trace in figure.data} >= {"parameters", "gradients", "moments", "activations", "logits"}


def test_time_is_that_of_the_classes_of_kernels(rows):
    figure = plot_time(rows)
    for row in rows:
        own = figure.frame[figure.frame.part == row["dry_run"]]
        assert own.seconds.sum() == pytest.approx(sum(row["seconds"].values()))
        phases = sum(found["seconds"] for found in row["phases"].values())
        assert own.seconds.sum() == pytest.approx(phases)
