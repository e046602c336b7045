"""Tests of the intervals that evaluations and analysis share."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.analysis_runs import make_run

from benchmarks.intervals import coverage, size_of_comparison
from rstar_lab.analysis.metrics import measure, pass_at_k
from rstar_lab.analysis.runs import open_runs
from rstar_lab.common import estimates
from rstar_lab.common.estimates import Side, format_interval, mean_interval, paired_difference, ratio
from rstar_lab.rl import evaluation
from rstar_lab.rl.evaluation import summarise
from rstar_lab.runs.reader import RunReader


def test_evaluation_and_analysis_give_the_same_intervals(tmp_path: Path):
    folder = make_run(tmp_path, "evaluated", problems=6)
    rows = RunReader(folder).read("trajectories").to_pylist()
    result, with_a_failure = summarise(rows), summarise(rows[1:])
    assert with_a_failure["samples"] == result["samples"] - 1, "pass@k of the samples that all problems have"
    runs = open_runs(tmp_path)
    for name, metric in (("calls", "calls"), ("error_rate", "tool_error_rate"), ("truncated", "truncation_rate")):
        row = measure(runs, [metric]).iloc[0]
        assert result["intervals"][name] == pytest.approx([row.value, row.low, row.high]), name
    for name, k in (("pass1", 1), (f"pass{result['samples']}", result["samples"])):
        row = pass_at_k(runs, [k]).iloc[0]
        assert row.low < row.value < row.high or row.value in (0, 1)
        assert result[name] == pytest.approx([row.value, row.low, row.high]), name


@pytest.mark.parametrize("samples", range(1, 7))
def test_pass_at_k_is_the_mean_over_all_draws(samples):
    for k, correct in itertools.product(range(1, samples + 1), range(samples + 1)):
        draws = list(itertools.combinations(range(samples), k))
        assert estimates.pass_at_k(k, samples, correct) == pytest.approx(np.mean([min(d) < correct for d in draws]))


@pytest.mark.parametrize("samples", range(1, 10))
def test_a_summary_has_pass_at_all_powers_of_two_and_the_majority(samples):
    """The first sample of each problem is correct; all others have the same wrong answer."""
    row = {"truth": "1", "response_tokens": 5, "calls": 0, "errors": 0, "truncated": False}
    answers = ["1", *["2"] * (samples - 1)]
    rows = [row | {"problem_id": name, "answer": a, "reward": float(a == "1")} for name in "abc" for a in answers]
    result = summarise(rows)
    shown = {int(k): interval[0] for k, interval in result["pass_at"].items()}
    assert shown == {k: pytest.approx(k / samples) for k in (1, 2, 4, 8) if k <= samples}
    assert result[f"maj{samples}"][0] == float(samples < 3), "a tie goes to the first answer"


def test_the_cache_of_answer_comparisons_is_bounded():
    assert evaluation._same.cache_info().maxsize


def test_the_interval_is_as_wide_as_the_normal_approximation():
    rng = np.random.default_rng(0)
    values = rng.normal(3, 2, 400)
    found = ratio(values, np.ones(400), 400)
    half = 1.96 * values.std(ddof=1) / 20
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * half, rel=0.08)


def test_copies_of_a_rollout_do_not_narrow_the_interval():
    rng = np.random.default_rng(0)
    problems = rng.random(30) < 0.5
    clustered = ratio(16.0 * problems, np.full(30, 16.0), 480)
    as_if_independent = ratio(np.repeat(problems, 16).astype(float), np.ones(480), 480)
    assert clustered.value == as_if_independent.value
    assert clustered.high - clustered.low > 3 * (as_if_independent.high - as_if_independent.low)


def test_a_difference_is_taken_within_each_problem():
    rng = np.random.default_rng(1)
    base = rng.normal(0, 10, 50)
    better = base + 1 + rng.normal(0, 0.1, 50)
    ones = np.ones((1, 50))
    found = paired_difference(Side(base[None], ones), Side(better[None], ones), 100)
    assert 0.9 < found.low < found.value < found.high < 1.1


def test_seeds_with_different_results_widen_the_interval():
    flat = Side(np.full((2, 40), 0.5), np.ones((2, 40)))
    seeds = Side(np.repeat([[0.2], [0.8], [0.6]], 40, axis=1), np.ones((3, 40)))
    found = paired_difference(flat, seeds, 160)
    assert found.value == pytest.approx(1.6 / 3 - 0.5)
    assert found.low < -0.1 < 0.1 < found.high


def test_an_undefined_interval_is_none_in_json_and_a_dash_in_text():
    one = ratio(np.array([3.0]), np.array([4.0]), 4)
    assert json.loads(json.dumps(one.as_list(), allow_nan=False)) == [0.75, None, None]
    assert format_interval(one.as_list()) == "75.0% [-, -]"
    nothing = ratio(np.array([]), np.array([]), 0)
    assert nothing.as_list() == [None, None, None] and nothing.clusters == 0


def test_clusters_without_a_denominator_are_left_out():
    found = ratio(np.array([1.0, 5.0, 0.0, 1.0]), np.array([2.0, 0.0, np.nan, 2.0]), 4)
    assert (found.value, found.clusters) == (0.5, 2) and found.low < 0.5 < found.high


@pytest.mark.parametrize("problems", [2, 5, 30, 500])
@pytest.mark.parametrize("correct", [0.0, 1.0])
def test_intervals_of_extreme_rates_have_a_width(problems, correct):
    found = ratio(np.full(problems, 4 * correct), np.full(problems, 4.0), 4 * problems)
    assert found.value == correct and 0 <= found.low < found.high <= 1
    assert found.high - found.low > 1 / (2 * problems)


@pytest.mark.parametrize("problems", [5, 8, 16, 30, 128])
@pytest.mark.parametrize("rate", [0.5, 0.97])
def test_intervals_of_rates_contain_the_truth_as_often_as_they_claim(problems, rate):
    assert coverage(problems, 16, rate, simulations=1000) > 0.92


@pytest.mark.parametrize("runs, deviation", [(1, 0.0), (2, 0.4), (3, 0.15), (8, 0.4)])
def test_comparisons_of_equal_sides_rarely_show_a_difference(runs, deviation):
    assert size_of_comparison(40, 4, 0.5, runs, deviation, simulations=1000) < 0.07


def test_equal_differences_in_all_problems_have_no_interval():
    found = paired_difference(Side(np.zeros((1, 9)), np.ones((1, 9))), Side(np.ones((1, 9)), np.ones((1, 9))), 18)
    assert found.value == 1 and np.isnan([found.low, found.high]).all()


def test_equal_differences_in_all_seeds_have_no_p_value():
    mean, low, high, p = mean_interval([1 / 30, 1 / 30])
    assert mean == pytest.approx(1 / 30) and np.isnan([low, high, p]).all()


def test_intervals_of_means_that_are_not_rates_are_students():
    values = np.array([3.0, 7.0, 8.0, 4.0])
    found = ratio(values, np.ones(4), 4)
    assert [found.low, found.high] == pytest.approx(list(mean_interval(values)[1:3]))


@pytest.mark.parametrize("values", [[0.4, 0.6], [3.0, 7.0, 8.0], [1.0, 2.0, 4.0, 8.0, 9.5]])
def test_intervals_over_a_few_seeds_are_those_of_scipy(values):
    from scipy import stats

    error = stats.sem(values)  # with n - 1 degrees of freedom
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), error)
    mean, *ends, p = mean_interval(values)
    assert [mean, *ends, p] == pytest.approx([np.mean(values), low, high, stats.ttest_1samp(values, 0.0).pvalue])
