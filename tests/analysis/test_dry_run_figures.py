"""Figures of a dry run: their values are those of its rows."""

from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from rstar_lab.analysis import plot_memory, plot_sweep, plot_time
from rstar_lab.cli.report import app
from rstar_lab.hardware.profiles import load_profile
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.preflight.dry_run import dry_run_rows


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


def test_what_a_run_has_measured_on_a_gpu_stands_beside_the_dry_run(rows):
    local = [{"stage": "rl", "step": step, "update_gpu_gb": gb, "update_s": s} for step, gb, s in
             ((1, 5.0, 9.0), (2, 6.5, 2.0), (3, 6.0, 3.0))]  # fmt: skip
    verl = [{"stage": "rl", "step": 1, "update_gpu_gb": 6.5, "update_actor_s": 3.0}]
    micro_batches = next(row["micro_batches"] for row in rows if row["dry_run"] == "rl")
    for steps in (pd.DataFrame(local), pd.DataFrame(verl)):
        memory, time = plot_memory(rows, steps).frame, plot_time(rows, steps).frame
        assert memory[memory.phase == "measured"].gb.tolist() == [6.5]
        assert time[time.kernels == "measured"].seconds.tolist() == [pytest.approx(3.0 / micro_batches)]
    on_a_cpu = pd.DataFrame([{"stage": "rl", "step": 1, "update_s": 3.0}])
    for steps in (on_a_cpu, on_a_cpu.assign(update_gpu_gb=0.0), pd.DataFrame(columns=["stage"])):
        assert "measured" not in set(plot_memory(rows, steps).frame.phase)
        assert "measured" not in set(plot_time(rows, steps).frame.kernels)


def test_a_sweep_shows_what_fits_and_the_recommended_values():
    def row(tokens, fits, update):
        values = {"micro_batch_tokens": tokens}
        return values | {"sweep": values, "with_margin_gb": 10.0, "update_s": update, "mfu_bound": 0.5, "fits": fits}

    figure = plot_sweep(
        [row(1, True, 3.0), row(2, True, 2.0), row(4, False, 1.0), {"recommended": {"micro_batch_tokens": 2}}]
    )
    shown = {trace.name: [list(trace.y), [text for text, _ in trace.customdata]] for trace in figure.data}
    assert shown["recommended"] == [[2.0], ["micro_batch_tokens 2"]]
    assert shown["fits"] == [[3.0], ["micro_batch_tokens 1"]] and shown["does not fit"][0] == [1.0]


def test_the_report_of_a_run_shows_the_dry_run_of_its_recipe(tmp_path):
    """The recipe of the golden run has keys of an earlier version."""
    run = Path(__file__).parents[1] / "golden/runs/tiny_fast-rl"
    out = tmp_path / "report.html"
    result = CliRunner().invoke(app, [str(run), "--dry-run", "one_gpu", "--sample", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "<h2>Memory and time of an update</h2>" in out.read_text() and "Where the memory goes" in out.read_text()
