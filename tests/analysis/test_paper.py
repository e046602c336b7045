"""Tests of held-out curves and of the paper's numbers, figures and tables."""

import json

import numpy as np
import pytest
from helpers.analysis_runs import make_run
from helpers.notebooks import GOLDEN
from helpers.run_rows import rows

from rstar_lab.analysis import open_runs, phase_table
from rstar_lab.analysis.ablation import ablation_report, ablation_sums
from rstar_lab.analysis.comparison import compare
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.analysis.metrics import curves, evaluations, measure
from rstar_lab.analysis.paper import published, reference, set_name
from rstar_lab.analysis.paper_figures import figures_of_the_paper, model_accuracy, results_table, stage_table
from rstar_lab.analysis.report import paper_html, report_html
from rstar_lab.runs import RunStoreError
from rstar_lab.runs.writer import RunWriter

pytestmark = pytest.mark.slow


@pytest.fixture
def runs(tmp_path):
    """Two runs of six steps, evaluated on aime24 and math500 every second step."""
    for seed in (0, 1):
        with RunWriter.open(tmp_path, f"run-{seed}-rl", kind="train", recipe={"label": "arm"}, seed=seed) as writer:
            for step in range(1, 7):
                line: dict = {"groups": 8, "equal_groups": 1, "update_tokens": 100}
                if step % 2 == 0:
                    line |= {"eval/aime24/pass1": 0.1 * step + 0.1 * seed, "eval/math500/pass1": 0.5}
                    line |= {"eval/aime24/response_tokens": 900.0}
                    line |= {"eval/aime24/low": 0.1 * step, "eval/aime24/high": 0.2 * step}
                writer.write_step("one" if step < 4 else "two", step, **rows(step), metrics=line)
            writer.finish("finished")
    return open_runs(tmp_path)


def test_evaluations_during_training_are_metrics_of_curves(runs):
    names = [f"eval/aime24/{name}" for name in ("high", "low", "pass1", "response_tokens")]
    assert evaluations(runs) == [*names, "eval/math500/pass1"]
    frame = curves(runs, ["pass1", "eval/aime24/pass1"], where="step > 1").set_index(["run_id", "step"])
    assert frame.loc[("run-1-rl", 4), "eval/aime24/pass1"] == pytest.approx(0.5)
    assert np.isnan(frame.loc[("run-0-rl", 3), "eval/aime24/pass1"]) and len(frame) == 10
    with pytest.raises(RunStoreError, match="no run has eval/aime25/pass1; evaluations: eval/aime24/high, "):
        curves(runs, ["eval/aime25/pass1"])
    with pytest.raises(RunStoreError, match="use curves"):
        measure(runs, ["eval/aime24/pass1"])
    with pytest.raises(RunStoreError, match="use curves"):
        compare(runs, runs, ["eval/aime24/pass1"])


def test_curves_of_evaluations_have_the_published_value_as_a_line(runs):
    figure = plot_curves(runs, ["eval/aime24/pass1", "pass1"], by="label", reference=True)
    assert [text.text for text in figure.layout.annotations if "rStar2" in text.text] == ["rStar2-Agent-14B: 80.6%"]
    assert [shape.y0 for shape in figure.layout.shapes if shape.y0 == shape.y1] == [pytest.approx(0.806)]
    lengths = plot_curves(runs, ["eval/aime24/response_tokens"], reference=True)
    assert [text.text for text in lengths.layout.annotations if "rStar2" in text.text] == ["rStar2-Agent-14B: 9,340"]
    plain = plot_curves(runs, ["eval/aime24/pass1"], by="label")
    values = plain.frame.set_index("step")["value"]
    assert values.to_dict() == pytest.approx({2: 0.25, 4: 0.45, 6: 0.65})
    assert not [shape for shape in plain.layout.shapes if shape.y0 == shape.y1]
    one = plot_curves(runs, ["eval/aime24/pass1", "eval/math500/pass1"], where={"run_id": "run-1-rl"}).frame
    ends = one[one.metric == "eval/aime24/pass1"].set_index("step")[["low", "high"]]
    assert ends.values.tolist() == pytest.approx(np.array([[0.2, 0.4], [0.4, 0.8], [0.6, 1.0]])), (
        "of the evaluation, in [0, 1]"
    )
    assert one[one.metric == "eval/math500/pass1"].low.isna().all()


def test_the_ablation_reads_evaluation_sets_of_any_name(runs):
    sums = ablation_sums(runs)
    found = sums[sums.held_out_denominator > 0].set_index(["seed", "step"]).held_out_numerator
    assert found[(1, 4)] == pytest.approx((0.5 + 0.5) / 2)
    names = ["eval/aime24/pass1", "eval/aime24/response_tokens"]
    table = ablation_report(ablation_sums(runs, ["pass1", *names]), control="arm").table.set_index("metric")
    assert table.loc[names, "value"].tolist() == [pytest.approx(0.65), 900.0] and table.loc[names[0], "seeds"] == 2


def test_sets_with_odd_names_are_drawn_with_their_reference(tmp_path):
    """As in the logs of other trainers: several parts, spaces, markup, letters of other scripts."""
    names = ["a/b", "my set", "AIME-2024", "<b>", "日本", 'x"y', "it's"]
    with RunWriter.open(tmp_path, "odd-rl", kind="train", recipe={}, seed=0) as writer:
        for step in (1, 2):
            line = {f"eval/{name}/pass1": 0.25 * step for name in names}
            writer.write_step("one", step, **rows(step), metrics=line if step == 2 else {})
    runs = open_runs(tmp_path)
    made = figures_of_the_paper(runs)
    assert set(made["held-out accuracy"].frame.metric) == {f"eval/{name}/pass1" for name in names}
    texts = [text.text for text in made["held-out accuracy"].layout.annotations]
    assert "rStar2-Agent-14B: 80.6%" in texts and len([text for text in texts if "rStar2" in text]) == 1
    assert made["stages"]["eval/a/b/pass1"].tolist() == [0.5]


def test_the_report_shows_evaluations_during_training(runs):
    page = report_html(runs.run_dir("run-0-rl"))
    assert "pass@1 on aime24" in page and "80.6%" in page


def test_figures_of_the_paper_are_made_from_own_runs(runs):
    made = figures_of_the_paper(runs)
    assert {"training", "held-out accuracy", "stages", "results"} <= set(made)
    stages = made["stages"].set_index(["run_id", "stage"])
    assert stages.loc[("run-0-rl", "two"), "last_step"] == 6 and stages.loc[
        ("run-0-rl", "two"), "eval/aime24/pass1"
    ] == pytest.approx(0.6)


def test_figures_of_ablations_calls_and_turns(tmp_path):
    for label in ("RoC", "none"):
        make_run(tmp_path, f"{label}-rl", steps=2, label=label)
    for turns in (2, 6):
        recipe = {"model": "tiny", "evaluate": {"max_turns": turns}}
        with RunWriter.open(tmp_path, f"eval-{turns}", kind="evaluate", recipe=recipe, seed=0) as writer:
            made = rows(1)
            for level in made.values():
                for row in level:
                    row["traj_id"] = f"eval-{turns}/{row['traj_id']}"
            writer.write_step("evaluate", 1, **made, metrics={})
            sets = {
                "aime24": {"pass1": [0.5, 0.4, 0.6], "response_tokens": 120.0},
                "AIME-2025": {"pass1": [0.25, 0.1, 0.4], "response_tokens": 90.5},
                "older": {"pass1": [0.5, None, None]},
            }
            writer.finish("finished", result={"pass1": [0.4, 0.3, 0.5], "sets": sets if turns == 6 else None})
    made = figures_of_the_paper(tmp_path)
    assert {"ablation", "tool calls", "accuracy by turns"} <= set(made)
    # Evaluations of a training run have its label, but are no seeds of it.
    with RunWriter.open(tmp_path, "RoC-aime24-step000001", kind="evaluate", recipe={"label": "RoC"}, seed=0) as writer:
        made_rows = rows(1)
        for row in (row for level in made_rows.values() for row in level):
            row["traj_id"] = f"step/{row['traj_id']}"
        writer.write_step("evaluate", 1, **made_rows, metrics={})
        writer.finish("finished", result={"pass1": [0.5, 0.4, 0.6]})
    mixed = figures_of_the_paper(tmp_path)
    assert mixed["ablation"].frame.runs.max() == 1 and len(mixed["accuracy by turns"].frame) == 2
    assert set(mixed["stages"].run_id) == {"RoC-rl", "none-rl"}
    assert set(ablation_sums(open_runs(tmp_path)).run_id) == {"RoC-rl", "none-rl"}
    calls = open_runs(tmp_path).sql("SELECT queue_s, run_s FROM calls WHERE run_id = 'RoC-rl' AND step = 2")
    frame = made["tool calls"].frame.set_index(["run_id", "step"])
    assert frame.loc[("RoC-rl", 2), "calls"] == len(calls) and (calls.queue_s > 0).any()
    assert frame.loc[("RoC-rl", 2), "seconds_per_call"] == pytest.approx((calls.queue_s + calls.run_s).mean())
    assert made["accuracy by turns"].frame.max_turns.tolist() == [2, 6]
    table = made["results"].set_index("model")
    assert table.loc["eval-6", ["aime24", "aime25"]].tolist() == [0.5, 0.25] and table.loc["eval-2", "other set"] >= 0
    lengths = made["lengths"].set_index("model")
    assert (
        lengths.loc["eval-6", ["aime24", "aime25"]].tolist() == [120.0, 90.5] and lengths.loc["eval-2", "other set"] > 0
    )
    assert lengths.loc["QwQ-32B", ["aime24", "source"]].tolist() == [11868.4, "Table 4"]
    alone = figures_of_the_paper(open_runs(tmp_path / "eval-2"))
    assert set(alone) == {"training", "tool calls", "stages", "results", "lengths"}


def test_published_numbers_are_complete_and_have_their_source():
    data = published()
    assert data["source"].endswith("2508.20722") and reference("eval/aime25/pass1") == pytest.approx(0.698)
    assert reference("eval/aime24/response_tokens") == 9339.7
    assert reference("pass1") is None and reference("eval/mine/pass1") is None and reference("eval/") is None
    assert (
        reference("eval/AIME-2024/pass1") == reference("eval/aime24/pass1")
        and reference("tool_error_rate_correct") == 0.1
    )
    assert (set_name("MATH-500"), set_name("hmmt_feb_2025"), set_name("my set")) == ("math500", "hmmt25", "my set")
    table = results_table().set_index("model")
    sets = ["math500", "aime24", "aime25", "hmmt25"]
    assert table.loc["rStar2-Agent-14B", sets].tolist() == pytest.approx([0.978, 0.806, 0.698, 0.527])
    assert sum(stage["steps"] for stage in data["stages"]) == 510
    assert table.loc["rStar2-Agent-Qwen2.5-32B", ["source", "aime24"]].tolist() == ["Table 6", pytest.approx(0.694)]
    groups = [data[name] for name in ("pass1", "response_tokens", "general")]
    entries = [*(entry for group in groups for entry in group.values()), *data["stages"]]
    entries.append(data["tool_error_rate_correct_without_roc"])
    named = [entry["source"] for entry in entries] + [
        data["sources"][name] for name in ("calls_per_step", "seconds_per_call")
    ]
    assert all(name.startswith(("Table ", "Figure ", "Section ")) for name in named)
    json.dumps(data)


def test_the_page_of_the_paper_has_figures_and_published_rows(tmp_path):
    page = paper_html(GOLDEN)
    for part in ("Claude-Opus-4.0", "98.2%", "GPQA-Diamond", "tiny_fast-eval-rl", "Words with the highest entropy"):
        assert part in page


def test_evaluations_of_models_belong_to_steps_of_their_training():
    table = model_accuracy(GOLDEN)
    assert [*zip(table.run_id, table.step, table.set, strict=True)] == [
        ("tiny_fast-rl", 0, "eval"),
        ("tiny_fast-rl", 8, "eval"),
    ]
    assert table.pass1.tolist() == pytest.approx([0.1953125, 0.5234375]) and (table.low < table.pass1).all()
    stages = stage_table(GOLDEN, {"run_id": ["tiny_fast-rl"]})
    assert stages["eval pass@1"].tolist() == [table.pass1[1]]


def test_phases_are_in_order_and_have_intervals():
    table = phase_table(GOLDEN, "tiny_fast", ("pass1",))
    assert list(table.index) == ["before training", "after SFT", "after RL"]
    ((value, low, high),) = measure(open_runs(GOLDEN, run_ids=["tiny_fast-eval-rl"]), ["pass1"])[
        ["value", "low", "high"]
    ].to_numpy()
    assert table.loc["after RL", "eval"].iloc[0] == f"{value:.1%} [{low:.1%}, {high:.1%}]"


def test_a_training_without_evaluations_says_so():
    table = phase_table(GOLDEN, "nothing")
    assert table.empty and "no evaluation" in table.columns[0]
