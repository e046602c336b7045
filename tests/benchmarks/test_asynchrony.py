"""Tests of the comparison of training modes, and that docs/async.md shows what the code computes."""

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.run_rows import rows

from benchmarks import published_async
from benchmarks.recorded import recorded_curves
from rstar_lab.analysis import open_runs
from rstar_lab.analysis.ablation import learning_curves, learning_table, plot_learning
from rstar_lab.analysis.timeline import plot_staleness
from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunWriter

PAGE = (Path(__file__).parents[2] / "docs" / "async.md").read_text()


def write_run(folder: Path, arm: str, seed: int, gain: float, **metrics: float) -> None:
    """Write a run of four steps; each trains 1,000 tokens in 2 s and gains `gain` in held-out pass@1."""
    recipe = {"label": arm}
    with RunWriter.open(folder, f"{arm}-{seed}", kind="train", recipe=recipe, seed=seed) as writer:
        for step in range(1, 5):
            line = {"update_tokens": 1000, "step_s": 3.0, "evaluate_s": 1.0, "generate_s": 1.5, **metrics}
            writer.write_step(
                "rl", step, **rows(step), metrics=line | {"eval/held_out/pass1": gain * step + 0.01 * seed}
            )
        writer.finish("finished")


@pytest.fixture
def runs(tmp_path):
    stale = {"engine_busy_s": 2.5} | dict.fromkeys(("dropped_share", "dropped_share_long", "dropped_share_hard"), 0.25)
    for seed in range(3):
        write_run(tmp_path, "sync", seed, gain=0.1)
        write_run(tmp_path, "async", seed, gain=0.12, staleness_mean=1.5, staleness_max=2, **stale)
    return open_runs(tmp_path)


def test_arms_are_paired_by_seed_at_equal_tokens_and_time(runs):
    curves = learning_curves(runs)
    assert len(curves) == 6 * 4 and curves.tokens.max() == 4000 and curves.seconds.max() == pytest.approx(8.0)
    table = learning_table(curves)
    assert (table.at_tokens, table.at_seconds) == (4000, pytest.approx(8.0))
    row = table.table.set_index("arm").loc["async"]
    assert row.pass1_tokens == pytest.approx(0.49) and row.seeds == 3 and row.speed == pytest.approx(1.0)
    # The seeds differ by a constant, so the paired difference is exact, and its interval unknown.
    assert row.difference_tokens == pytest.approx(0.08) and np.isnan([row.low_tokens, row.high_tokens]).all()
    assert "49.0%, +8.0 |" in table.to_markdown()
    assert len(plot_learning(curves).data) == 4  # a band and a line for each arm


def test_a_run_that_ended_early_counts_with_its_last_evaluation():
    frame = pd.DataFrame(
        [("sync", 0, 1, 1000, 1.0, 0.2), ("sync", 0, 2, 2000, 2.0, 0.4), ("async", 0, 1, 900, 0.5, 0.3)],
        columns=["arm", "seed", "step", "tokens", "seconds", "pass1"],
    )
    table = learning_table(frame).table.set_index("arm")
    assert table.pass1_tokens.to_dict() == {"sync": 0.4, "async": 0.3}
    with pytest.raises(UserError, match="no arm 'grpo'"):
        learning_table(frame, control="grpo")


def test_runs_without_an_update_have_trained_no_tokens(tmp_path):
    for arm in ("sync", "async"):
        with RunWriter.open(tmp_path, f"{arm}-0", kind="train", recipe={"label": arm}, seed=0) as writer:
            for step in (1, 2):
                writer.write_step("rl", step, **rows(step), metrics={"step_s": 1.0, "eval/held_out/pass1": 0.1 * step})
            writer.finish("finished")
    curves = learning_curves(open_runs(tmp_path))
    assert curves.tokens.tolist() == [0] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = learning_table(curves)
    assert table.table.pass1_tokens.tolist() == pytest.approx([0.2, 0.2])
    assert table.table.speed.isna().all() and "| sync | 1 | - | 20.0% |" in table.to_markdown()


def test_staleness_of_a_run_is_plotted(runs):
    figure = plot_staleness(runs, "async-0")
    shown = {trace.name: list(trace.y) for trace in figure.data}
    assert shown["maximum"] == [2] * 4 and shown["generator"] == pytest.approx([1 - 2.5 / 3] * 4)
    assert shown["trainer"] == pytest.approx([0.5] * 4) and shown["longest third"] == [0.25] * 4
    with pytest.raises(UserError, match="mode sync"):
        plot_staleness(open_runs(runs.path, run_ids=["sync-0"]), "sync-0")


@pytest.mark.parametrize("record", ["async", "async-fast"])
def test_page_shows_the_tables_of_the_recorded_runs(record):
    assert learning_table(recorded_curves(record)).to_markdown().strip() in PAGE


def test_recorded_runs_support_the_sentences_of_the_page():
    curves = recorded_curves()
    table = learning_table(curves).table.set_index("arm").drop("sync")
    assert set(table.seeds) == {5}
    same = table.loc[["one step off", "async, staleness 1", "async, staleness 2", "async, staleness 4"]]
    assert same.difference_tokens.abs().max() < 0.012 and same.low_tokens.min() > -0.05
    assert same.difference_seconds.between(0, 0.02).all()
    uncorrected = "async, staleness 2, no correction"
    last = curves[(curves.arm == uncorrected) & (curves.step == 30)].pass1.sort_values()
    assert [round(100 * value) for value in last[:2]] == [9, 29] and last.iloc[2] > 0.48
    assert round(100 * table.difference_tokens[uncorrected]) == -20
    without_roc = table.loc[["sync, no RoC", "async, staleness 2, no RoC"]]
    assert without_roc.difference_tokens.between(-0.025, -0.015).all()
    for at in ("tokens", "seconds"):
        assert (table[f"low_{at}"] < 0).all() and (table[f"high_{at}"] > 0).all()


@pytest.mark.slow
def test_page_shows_the_predicted_speed_ups():
    assert published_async.table() in PAGE


def test_the_readme_shows_learning_and_speed_of_the_same_asynchronous_runs():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    row = learning_table(recorded_curves()).table.set_index("arm").loc["async, staleness 2"]
    change = f"{100 * row.difference_tokens:+.1f} points [{100 * row.low_tokens:+.1f}, {100 * row.high_tokens:+.1f}]"
    assert change in readme and f"{row.speed:.2f}x as fast" in readme
    fast = learning_table(recorded_curves("async-fast")).table.set_index("arm").loc["async, staleness 2"]
    assert f"{100 * fast.difference_tokens:+.1f} points ({fast.seeds:.0f} seeds)" in readme
