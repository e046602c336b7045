"""Tests of metrics against pandas on the same rows, and of pass@k and outcome shares."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.analysis_runs import make_run

from rstar_lab.analysis.metrics import METRICS, curves, measure, pass_at_k
from rstar_lab.analysis.runs import open_runs
from rstar_lab.analysis.tables import format_numbers
from rstar_lab.common.outcomes import count_errors
from rstar_lab.runs import RunStoreError, RunWriter


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for roc in ("paper", "none"):
        for seed in range(2):
            make_run(folder, f"{roc}{seed}", roc=roc, seed=seed)
    return open_runs(folder)


@pytest.fixture(scope="module")
def rows(runs):
    return runs.trajectories()


def weighted(rows, values, weights):
    known = values.notna() & weights.notna()
    return (values * weights)[known].sum() / weights[known].sum()


def by_hand(rows):
    tallies = pd.DataFrame(
        [count_errors(list(kinds)) for kinds in rows.outcomes], columns=["errors", "calls"], index=rows.index
    )
    correct = rows.reward > 0
    return {
        "pass1": correct.mean(),
        "tool_error_rate": tallies.errors.sum() / tallies.calls.sum(),
        "tool_error_rate_correct": tallies.errors[correct].sum() / tallies.calls[correct].sum(),
        "tool_error_rate_incorrect": tallies.errors[~correct].sum() / tallies.calls[~correct].sum(),
        "our_failure_rate": 1 - tallies.calls.sum() / rows.outcomes.map(len).sum(),
        "calls": tallies.calls.mean(),
        "turns": rows.turns.mean(),
        "response_tokens": rows.response_tokens.mean(),
        "response_tokens_correct": rows.response_tokens[correct].mean(),
        "tool_tokens": (rows.response_tokens - rows.model_tokens).mean(),
        "truncation_rate": rows.truncated.mean(),
        "duplicate_answers": (rows.p_format > 0).mean(),
        "entropy": weighted(rows, rows.entropy, rows.model_tokens),
        "log_prob_gap": weighted(rows, rows.engine_log_prob - rows.trainer_log_prob, rows.model_tokens),
        "reflection_tokens": rows.reflection_tokens.mean(),
        "kept": rows.kept.mean(),
    }


def test_metrics_equal_plain_pandas(runs, rows):
    for run_id, of_run in rows.groupby("run_id"):
        wanted = by_hand(of_run)
        found = measure(runs, list(wanted), where={"run_id": run_id}).set_index("metric").value
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, rel=1e-5), name


def test_metrics_of_the_rollup_equal_those_of_the_trajectories(runs):
    names = [name for name, metric in METRICS.items() if metric.rolled_up]
    fast = curves(runs, names).set_index(["run_id", "step"])
    slow = measure(runs, names, by=("run_id", "step")).pivot(index=["run_id", "step"], columns="metric", values="value")
    assert len(fast) == 24
    for name in names:
        np.testing.assert_allclose(
            fast[name].to_numpy(float), slow[name].to_numpy(float), rtol=1e-4, atol=1e-9, err_msg=name
        )


def test_every_metric_has_a_title_and_a_formula():
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.title and metric.formula


def test_intervals_report_rollouts_and_problems(runs):
    found = measure(runs, ["pass1"], where={"run_id": "paper0"}).iloc[0]
    assert (found.n, found.clusters) == (192, 4)
    assert found.low < found.value < found.high


def test_one_problem_has_no_interval(runs):
    one = measure(runs, ["pass1"], where={"run_id": "paper0", "problem_id": "p1"}).iloc[0]
    assert one.clusters == 1 and np.isnan(one.low) and np.isnan(one.high)


def test_pass_at_k_equals_the_unbiased_estimator(runs, rows):
    step = {"run_id": "paper0", "step": 3}
    found = pass_at_k(runs, (1, 2, 8, 9), where=step).set_index("k").value
    of_step = rows[(rows.run_id == "paper0") & (rows.step == 3)]
    share = of_step.groupby("problem_id").reward.mean()
    assert found[1] == pytest.approx(share.mean())
    pairs = [
        np.mean([a > 0 or b > 0 for i, a in enumerate(group) for b in list(group)[i + 1 :]])
        for _, group in of_step.groupby("problem_id").reward
    ]
    assert found[2] == pytest.approx(np.mean(pairs))
    assert found[8] == pytest.approx((share > 0).mean())
    assert np.isnan(found[9])


def test_unknown_metrics_are_errors_that_list_the_known_ones(runs):
    with pytest.raises(RunStoreError, match=r"unknown metric 'pas1'; there are pass1,"):
        measure(runs, ["pas1"])
    with pytest.raises(RunStoreError, match=r"metrics\.bonus is not in the rollup"):
        curves(runs, ["metrics.bonus"])


def test_metrics_of_values_that_a_run_lacks_are_nan(tmp_path):
    with RunWriter.open(tmp_path, "bare", kind="import", recipe={}, seed=0) as writer:
        rows = [{"traj_id": f"b{i}", "problem_id": f"p{i % 3}", "reward": float(i % 2)} for i in range(6)]
        writer.write_step("train", 1, trajectories=rows, calls=[], transcripts=[], metrics={})
    runs = open_runs(tmp_path)
    names = list(METRICS)
    for found in (
        measure(runs, names).set_index("metric").value,
        curves(runs, [name for name in names if METRICS[name].rolled_up]).iloc[0][3:],
    ):
        assert found["pass1"] == 0.5
        for name in (
            "tool_error_rate",
            "calls",
            "response_tokens",
            "entropy",
            "truncation_rate",
            "duplicate_answers",
            "kept",
        ):
            assert pd.isna(found[name]), name
    with pytest.raises(RunStoreError, match="no calls are stored in run bare"):
        runs.calls()


def test_docs_list_every_metric_with_its_formula():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for name, metric in METRICS.items():
        assert f"| `{name}` | {metric.formula} |" in page


def test_correct_rewarded_and_verified_are_three_columns(tmp_path):
    """With a reward function of the user, a positive reward does not mean a correct answer."""
    rewards = [1.0, 0.5, 0.0, None]
    rows = [
        {"traj_id": f"{number}", "problem_id": "p", "group_id": "g", "reward": reward}
        for number, reward in enumerate(rewards)
    ]
    for run_id, kind, recipe in (
        ("verify", "train", {"rl": {"reward": "verify"}}),
        ("own", "train", {"rl": {"reward": "module:function"}}),
        ("import", "import", {"source": "verl"}),
    ):
        with RunWriter.open(tmp_path, run_id, kind=kind, recipe=recipe, seed=0) as writer:
            own_rows = [row | {"traj_id": f"{run_id}/{row['traj_id']}"} for row in rows]
            writer.write_step("s", 1, trajectories=own_rows, calls=[], transcripts=[], metrics={})
    runs = open_runs(tmp_path)
    table = runs.trajectories(order_by="traj_id").groupby("run_id")
    counts = table[["rewarded", "verified", "correct"]].sum().astype(int)
    assert counts.loc["verify"].tolist() == [2, 3, 2]
    assert counts.loc["own"].tolist() == [2, 0, 0] and table.correct.count()["own"] == 0
    assert counts.loc["import"].tolist() == [2, 0, 2]
    for metric, expected in (("pass1", [2 / 3, np.nan, 2 / 3]), ("rewarded", [2 / 3] * 3)):
        measured = measure(runs, [metric]).set_index("run_id").value
        rolled_up = curves(runs, [metric]).set_index("run_id")[metric]
        for values in (measured, rolled_up):
            np.testing.assert_allclose(values[["verify", "own", "import"]].to_numpy(float), expected)
    shares = pass_at_k(runs, (1,)).set_index("run_id").value
    assert shares["verify"] == pytest.approx(2 / 3) and np.isnan(shares["own"])


def test_shares_are_percentages_and_other_numbers_have_three_digits():
    frame = pd.DataFrame(
        {
            ("pass1", "easy"): [0.93945, np.nan],
            ("response_tokens", "easy"): [40.5508, 1234.5],
            ("high_share", ""): [0.5, 0.25],
            ("count", ""): [3, 4],
        },
        index=["a", "b"],
    )
    shown = format_numbers(frame)
    assert shown.columns.equals(frame.columns) and shown.index.equals(frame.index)
    assert shown.values.tolist() == [["93.9%", "40.6", "50.0%", 3], ["–", "1,234", "25.0%", 4]]
