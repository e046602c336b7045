"""Tests of the ablation report against scipy, of Student's t and Holm's correction, and of the command."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.analysis_runs import make_run
from helpers.run_rows import rows
from typer.testing import CliRunner

from benchmarks.pretrained import ARMS as PRETRAINED_ARMS
from benchmarks.pretrained import SEEDS as PRETRAINED_SEEDS
from benchmarks.pretrained import STEPS, tables
from benchmarks.recorded import HANDLING, plot_faults, recorded_sums
from benchmarks.sandbox_faults import fault_arms, handling_differences, handling_table
from rstar_lab.analysis.ablation import METRICS, ablation_report, ablation_sums, plot_frontier
from rstar_lab.analysis.runs import open_runs
from rstar_lab.cli.ablation import app
from rstar_lab.common.estimates import holm, mean_interval
from rstar_lab.common.resources import benchmark_file
from rstar_lab.runs import RunStoreError, RunWriter

pytestmark = pytest.mark.slow

ARMS = {"2x at random": "none", "RoC (paper)": "paper", "RoC (released)": "released"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for number, (label, roc) in enumerate(ARMS.items()):
        for seed in range(4):
            make_run(
                root, f"ablation-{number}-{seed}", roc=roc, seed=10 * number + seed, label=label, steps=6, problems=6
            )
    # The helper draws its rollouts from the seed, so the stored seed of a pair is set here.
    for path in root.glob("*/run.json"):
        info = json.loads(path.read_text())
        path.write_text(json.dumps(info | {"seed": info["seed"] % 10}))
    return root


@pytest.fixture(scope="module")
def report(folder):
    return ablation_report(ablation_sums(open_runs(folder)), control="2x at random")


def test_values_and_intervals_equal_a_paired_t_test_on_the_trajectories(folder, report):
    from scipy.stats import ttest_rel

    rows = open_runs(folder).trajectories("step > 4")
    table = open_runs(folder).runs().set_index("run_id")
    rows["arm"], rows["seed"] = rows.run_id.map(table["recipe.label"]), rows.run_id.map(table.seed)
    assert report.steps == (5, 6)
    found = report.table.set_index(["arm", "metric"])
    by_run = {
        "pass1": rows.assign(value=rows.reward > 0).groupby(["arm", "seed"]).value.mean(),
        "response_tokens": rows.groupby(["arm", "seed"]).response_tokens.mean(),
    }
    correct = rows[rows.reward > 0].groupby(["arm", "seed"])[["errors", "calls"]].sum()
    by_run["tool_error_rate_correct"] = correct.errors / correct.calls
    for metric, values in by_run.items():
        control = values["2x at random"]
        assert found.loc[("2x at random", metric), "value"] == pytest.approx(control.mean())
        for arm in ("RoC (paper)", "RoC (released)"):
            test = ttest_rel(values[arm], control)
            interval = test.confidence_interval(0.95)
            row = found.loc[(arm, metric)]
            assert row.value == pytest.approx(values[arm].mean()) and row.seeds == 4
            assert [row.difference, row.low, row.high, row.p] == pytest.approx(
                [(values[arm] - control).mean(), interval.low, interval.high, test.pvalue]
            )
    p = report.table.p.dropna().sort_values()
    largest = np.maximum.accumulate(np.minimum(1, p.to_numpy() * np.arange(len(p), 0, -1)))
    np.testing.assert_allclose(report.table.p_holm[p.index], largest)


def test_markdown_shows_each_arm_and_marks_corrected_differences(report):
    text = report.to_markdown()
    lines = text.splitlines()
    assert lines[0].startswith("| arm | pass@1 | tool-error rate in correct trajectories |")
    assert [line.split(" | ")[0] for line in lines[2:5]] == [f"| {arm}" for arm in ARMS]
    assert "Steps 5 to 6" in text and "(4 seeds)" in text and "over 10 comparisons" in text
    significant = report.table.p_holm < 0.05
    assert text.count("**") == 2 * significant.sum()
    found = report.table[significant].metric.nunique()
    assert len(report.conclusions()) == found + (found < len(METRICS))
    for row in report.table[significant].to_dict("records"):
        word = "lower" if row["difference"] < 0 else "higher"
        assert any(word in line and row["arm"] in line for line in report.conclusions())


def test_command_recomputes_the_report_from_saved_data(folder, tmp_path, report):
    data = tmp_path / "ablation.parquet"
    first = CliRunner().invoke(app, ["report", str(folder), "--save-data", str(data)])
    again = CliRunner().invoke(app, ["report", str(data)])
    assert first.exit_code == again.exit_code == 0, first.output
    assert first.output == again.output == report.to_markdown()
    lines = CliRunner().invoke(app, ["report", str(data), "--json", "--arm", "2x at random", "--arm", "RoC (paper)"])
    rows = [json.loads(line) for line in lines.output.splitlines()]
    assert len(rows) == 2 * len(METRICS) and rows[0]["difference"] is None and rows[-1]["seeds"] == 4


def test_invalid_input_is_an_error_that_names_it(folder, tmp_path):
    sums = ablation_sums(open_runs(folder))
    with pytest.raises(RunStoreError, match="no run has the label 'GRPO'; the labels are 2x at random"):
        ablation_report(sums, control="GRPO")
    doubled = pd.concat([sums, sums.assign(run_id=sums.run_id + "x")])
    with pytest.raises(RunStoreError, match="has two runs of seed 0"):
        ablation_report(doubled, control="2x at random")
    with pytest.raises(RunStoreError, match=r"ends at step 5 and run .* at step 6: finish all runs"):
        ablation_report(sums[(sums.run_id != "ablation-0-0") | (sums.step < 6)], control="2x at random")
    make_run(tmp_path, "bare", steps=1)
    (tmp_path / "empty").mkdir()
    for runs_dir, found in ((tmp_path, "there is: bare"), (tmp_path / "empty", "there is: no run")):
        result = CliRunner().invoke(app, ["report", str(runs_dir)])
        assert isinstance(result.exception, RunStoreError) and found in str(result.exception)
    with pytest.raises(RunStoreError, match="no training run with the recipe key `label`"):
        ablation_sums(open_runs(tmp_path / "empty"))
    (tmp_path / "x.parquet").write_text("x")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "x.parquet")])
    assert isinstance(result.exception, RunStoreError) and "cannot be read as Parquet" in str(result.exception)


@pytest.mark.slow
def test_seeds_without_the_control_are_left_out(folder):
    sums = ablation_sums(open_runs(folder))
    table = ablation_report(sums[(sums.arm != "2x at random") | (sums.seed != 3)], control="2x at random").table
    assert set(table.seeds[table.arm != "2x at random"]) == {3}


def test_the_interval_of_a_mean_is_students_and_holm_follows_its_definition():
    from scipy import stats

    values, test = [0.1, 0.3, 0.35], stats.ttest_1samp([0.1, 0.3, 0.35], 0)
    assert mean_interval(values) == pytest.approx((0.25, *test.confidence_interval(0.95), test.pvalue))
    assert holm([0.01, 0.04, 0.03, float("nan")])[:3] == pytest.approx([0.03, 0.06, 0.06])
    assert mean_interval([1.0])[0] == 1.0 and np.isnan(mean_interval([1.0])[1:]).all()
    assert np.isnan(mean_interval([])).all() and np.isnan(mean_interval([0.0, 0.0])[1:]).all()


@pytest.fixture
def evaluated(tmp_path):
    """Two arms with two seeds of six steps, evaluated every second step: seed 1 is 0.1 better, and so is the second arm."""
    for number, arm in enumerate(("2x at random", "RoC (paper)")):
        for seed in (0, 1):
            recipe = {"label": arm}
            with RunWriter.open(tmp_path, f"run-{number}-{seed}", kind="train", recipe=recipe, seed=seed) as writer:
                for step in range(1, 7):
                    line: dict = {"update_tokens": 1000 * step, "groups": 8, "equal_groups": 2 * number}
                    if step % 2 == 0:
                        line["eval/held_out/pass1"] = 0.1 * step + 0.1 * seed + 0.1 * number
                    writer.write_step("rl", step, **rows(step), metrics=line)
                writer.finish("finished")
    return ablation_sums(open_runs(tmp_path))


def test_held_out_and_informative_groups_are_read_from_metrics_jsonl(evaluated):
    report = ablation_report(evaluated, control="2x at random")
    assert report.steps == (5, 6)
    found = report.table.set_index(["arm", "metric"])
    control, roc = found.loc[("2x at random", "held_out")], found.loc[("RoC (paper)", "held_out")]
    assert control["value"] == pytest.approx(0.65) and roc["value"] == pytest.approx(0.75)
    assert roc["difference"] == pytest.approx(0.1)
    assert found.loc[("RoC (paper)", "informative_groups"), "value"] == pytest.approx(6 / 8)
    assert "held-out pass@1" in report.to_markdown()


def test_frontier_has_a_point_per_evaluation_over_the_tokens_so_far(evaluated, folder):
    figure = plot_frontier(evaluated, ["RoC (paper)", "2x at random"])
    (curve,) = [trace for trace in figure.data if trace.name == "RoC (paper)" and trace.xaxis == "x"]
    assert list(curve.y) == pytest.approx([0.35, 0.55, 0.75])
    per_run = evaluated[evaluated.run_id == "run-1-0"].sort_values("step")
    assert list(curve.x) == pytest.approx(list(per_run.tokens.cumsum().iloc[[1, 3, 5]]))
    assert per_run.tokens.iloc[0] > 1000, "generated and trained tokens"
    for trace in figure.data:
        assert len(trace.x) == len(trace.y)
    with pytest.raises(RunStoreError, match=r"set evaluate\.during\.every"):
        plot_frontier(ablation_sums(open_runs(folder)))


def test_faults_are_plotted_by_share_and_by_what_becomes_of_the_rollouts(evaluated):
    names = {"run-0-0": "0%", "run-0-1": "0%", "run-1-0": "15%, masked", "run-1-1": "15%, masked"}
    others = [
        evaluated[evaluated.arm == "RoC (paper)"].assign(arm=f"15%, {name}", run_id=name)
        for name in ("counted", "retried")
    ]
    figure = plot_faults(pd.concat([evaluated.assign(arm=evaluated.run_id.map(names)), *others]))
    curves = {(trace.name, trace.xaxis): trace for trace in figure.data if trace.mode == "lines+markers"}
    for name in HANDLING.values():
        curve = curves[name, "x"]
        assert list(curve.x) == [0, 0.15] and list(curve.y) == pytest.approx([0.65, 0.75])
    with pytest.raises(RunStoreError, match="does not belong to a grid of sandbox faults"):
        plot_faults(evaluated)


def test_command_writes_the_figure(evaluated, tmp_path):
    evaluated.to_parquet(tmp_path / "sums.parquet")
    page = tmp_path / "figure.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "sums.parquet"), "--figure", str(page)])
    assert done.exit_code == 0, done.output
    assert "held-out pass@1" in page.read_text() and "RoC (paper)" in page.read_text()
    wrong = CliRunner().invoke(app, ["report", str(tmp_path / "sums.parquet"), "--figure", "figure.txt"])
    assert isinstance(wrong.exception, RunStoreError) and "cannot save as" in str(wrong.exception)


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("name", "control"),
    [
        ("ablation", "2x at random"),
        ("ablation-clean", "2x at random"),
        ("ablation-options", "RoC (paper)"),
        ("ablation-echo", "RoC (paper)"),
        ("ablation-faults", "0%"),
    ],
)
def test_page_shows_the_table_of_the_recorded_runs(name, control):
    sums = recorded_sums(name)
    arms = list(fault_arms()) if name == "ablation-faults" else list(dict.fromkeys(sums.arm))
    report = ablation_report(sums, control=control, arms=arms)
    assert report.to_markdown().strip() in (DOCS / "ablation.md").read_text()


def test_recorded_runs_support_the_sentences_of_the_page():
    sums = recorded_sums()
    table = ablation_report(sums, control="2x at random").table.set_index(["arm", "metric"])
    assert set(table.seeds) == {8}
    errors = table.xs("tool_error_rate_correct", level="metric")
    for arm in ("RoC (paper)", "RoC (released)", "RoC, errors only"):
        assert errors.loc[arm, "value"] < 0.115 and errors.loc[arm, "p_holm"] < 0.05
    for arm in ("GRPO", "2x, quotas", "RoC, format only"):
        assert errors.loc[arm, "low"] < 0 < errors.loc[arm, "high"]
    held_out = table.xs("held_out", level="metric")
    ahead = held_out[held_out.low > 0]
    assert list(ahead.index) == ["RoC (paper)", "RoC (released)", "RoC, errors only"]
    assert ahead.difference.between(0.035, 0.07).all() and (held_out.p_holm.dropna() >= 0.05).all()
    training = table.xs("informative_groups", level="metric")
    assert training.loc["2x, quotas", "value"] == pytest.approx(0.92, abs=0.005)
    tokens = sums.groupby("arm").tokens.sum()
    assert tokens["GRPO"] / tokens["RoC (paper)"] == pytest.approx(2 / 3, abs=0.08)


def test_recorded_clean_runs_support_the_sentences_of_the_page():
    table = ablation_report(recorded_sums("ablation-clean"), control="2x at random").table
    assert set(table.seeds) == {8}
    assert table.value[table.metric == "tool_error_rate_correct"].max() < 0.0005
    trained = table.metric == "informative_groups"
    assert (table.p_holm[~trained].dropna() >= 0.05).all()
    quotas = table[trained & ~table.arm.isin(["2x at random", "GRPO"])]
    assert len(quotas) == 5 and (quotas.p_holm < 0.05).all() and (quotas.difference > 0).all()


def test_recorded_options_support_the_sentences_of_the_page():
    options, table = (
        ablation_report(recorded_sums(name), control="RoC (paper)").table.set_index(["arm", "metric"])
        for name in ("ablation-options", "ablation-echo")
    )
    assert set(options.seeds) == set(table.seeds) == {5}
    held_out, duplicates = table.loc[("RoC, ECHO", "held_out")], table.loc[("RoC, ECHO", "duplicate_answers")]
    assert round(100 * held_out.difference, 1) == -12.5 and held_out.p_holm < 0.05
    assert duplicates.value > 2 * table.value["RoC (paper)", "duplicate_answers"] and duplicates.p_holm < 0.05
    assert (options.loc[["RoC, OTB", "RoC, branching"]].p_holm >= 0.05).all()


def test_recorded_faults_support_the_sentences_of_the_page():
    sums = recorded_sums("ablation-faults")
    page = (DOCS / "ablation.md").read_text()
    assert handling_table(sums) in page
    runs = sums.drop_duplicates("run_id")
    assert set(runs.groupby("arm").size()) == {5} and set(runs.seed.groupby(runs.arm).nunique()) == {5}
    table = ablation_report(sums, control="0%").table
    held_out = table[table.metric == "held_out"].set_index("arm")
    assert (held_out.p_holm.drop("0%") >= 0.05).all() and table.p.notna().sum() == 60
    ranges = [f"{held_out.value['0%']:.1%}"]
    for name in ("counted", "masked", "retried"):
        own = held_out.value[held_out.index.str.endswith(name)]
        ranges.append(f"{own.min():.1%} to {own.max():.1%} (`{name}`)")
    assert "reaches {}; with failures {}, {} and {}.".format(*ranges) in page
    found = handling_differences(sums)
    assert [tuple(row) for row in found[found.low > 0][["share", "arm", "positive"]].to_numpy()] == [
        ("all", "retried", 5)
    ]
    masked, retried = (found[(found.share == "all") & (found.arm == arm)].iloc[0] for arm in ("masked", "retried"))
    text = "{:.1f} points [{:.1f}, {:.1f}]"
    for row, sentence in ((retried, f"`retried` is {text} above"), (masked, f"not shown: {text} over")):
        assert sentence.format(*(100 * row[key] for key in ("difference", "low", "high"))) in page
    assert found.low.min() > -0.105 and found.high.max() < 0.155


def test_recorded_runs_of_a_pretrained_model_support_the_page_and_the_readme():
    sums, held_out = recorded_sums("ablation-pretrained"), pd.read_csv(benchmark_file("ablation-pretrained.csv"))
    page, readme = (DOCS / "ablation.md").read_text(), (DOCS.parent / "README.md").read_text()
    for name, table in tables(sums, held_out).items():
        assert table.strip() in page, name
    runs = sums.drop_duplicates("run_id")
    assert list(runs.groupby("arm", sort=False).seed.nunique().items()) == [
        (arm, len(PRETRAINED_SEEDS)) for arm in PRETRAINED_ARMS
    ]
    # Equal numbers of generated rollouts, and equal rollouts of the SFT model in the first step.
    assert set(sums.groupby("run_id").model_tokens_denominator.sum()) == {192} and sums.step.max() == STEPS
    first = sums[sums.step == 1].groupby("arm").tool_error_rate_numerator.sum()
    assert first.nunique() == 1 and f"{first.iloc[0]:.0f} of" in page
    table = ablation_report(sums, control="RoC (paper)").table.set_index(["arm", "metric"])
    assert (table.p_holm.dropna() >= 0.05).all()
    for arm in ("GRPO", "2x at random"):
        row = table.loc[arm, "held_out"]
        text = "{:+.1f} points [{:+.1f}, {:+.1f}]".format(*(100 * row[key] for key in ("difference", "low", "high")))
        assert text in readme


def test_the_readme_shows_the_effect_of_roc_as_recorded():
    readme = (DOCS.parent / "README.md").read_text()
    rows = {}
    for name in ("ablation", "ablation-clean"):
        table = ablation_report(recorded_sums(name), control="2x at random").table.set_index(["arm", "metric"])
        rows[name] = {arm: table.loc[arm, "tool_error_rate_correct"] for arm in ("RoC (paper)", "2x at random")}
    roc, control = rows["ablation"]["RoC (paper)"], rows["ablation"]["2x at random"].value
    change = f"{100 * roc.difference:.1f} points [{100 * roc.low:.1f}, {100 * roc.high:.1f}]"
    assert f"{roc.value:.1%}, not {control:.1%}: {change}" in readme and f"{roc.seeds:.0f} seeds" in readme
    clean = rows["ablation-clean"]
    assert f"{clean['RoC (paper)'].value:.1%} and {clean['2x at random'].value:.1%}, no effect" in readme
