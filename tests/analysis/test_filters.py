"""Tests of the one grammar of filters: a mapping or SQL text selects the same rows in data frames, figures and the inspector."""

import inspect as signatures
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.analysis_runs import make_run
from helpers.cases import read_cases

import rstar_lab.analysis as analysis
from rstar_lab.analysis import inspect, open_runs
from rstar_lab.analysis.filters import selects_steps, where_sql
from rstar_lab.analysis.inspector.notes import write_note
from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunStoreError

# (mapping, the same as SQL text, the same in pandas)
CASES = [
    ({"errors": True}, "errors > 0", lambda f: f.errors > 0),
    ({"errors": False}, "errors = 0", lambda f: f.errors == 0),
    ({"errors": 1}, "errors = 1", lambda f: f.errors == 1),
    ({"correct": True}, "correct", lambda f: f.reward > 0),
    ({"correct": False, "kept": True}, "NOT correct AND kept", lambda f: (f.reward <= 0) & f.kept),
    ({"correct": True, "errors": True}, "correct AND errors > 0", lambda f: (f.reward > 0) & (f.errors > 0)),
    ({"reward": 1.0}, "reward = 1", lambda f: f.reward == 1),
    ({"steps": (2, 3)}, "step BETWEEN 2 AND 3", lambda f: f.step.between(2, 3)),
    ({"step": np.int64(2)}, "step = 2", lambda f: f.step == 2),
    ({"step": [1, np.int32(3)]}, "step IN (1, 3)", lambda f: f.step.isin([1, 3])),
    ({"run_id": "a"}, "run_id = 'a'", lambda f: f.run_id == "a"),
    ({"advantage": None}, "advantage IS NULL", lambda f: f.advantage.isna()),
    ({"step": []}, "false", lambda f: f.step < 0),
    ({"outcome": "timeout"}, "list_contains(outcomes, 'timeout')", lambda f: f.outcomes.map(lambda o: "timeout" in list(o))),
    ({"problem": "P1"}, "problem_id = 'p1'", lambda f: f.problem_id == "p1"),
    ({"ranges": {"response_tokens": (48, 96)}}, "response_tokens BETWEEN 48 AND 95", lambda f: f.response_tokens.between(48, 95)),
    ({"ranges": {"turns": (None, 2)}}, "turns < 2", lambda f: f.turns < 2),
    ({"any": [{"step": 1}, "errors > 1"]}, "step = 1 OR errors > 1", lambda f: (f.step == 1) | (f.errors > 1)),
    ({"sql": "turns > 2", "step": 1}, "turns > 2 AND step = 1", lambda f: (f.turns > 2) & (f.step == 1)),
    (None, "", lambda f: f.step > 0),
    ({}, "  ", lambda f: f.step > 0),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    make_run(path, "a", steps=4)
    make_run(path, "b", steps=4, roc="none", seed=1)
    return path


@pytest.fixture(scope="module")
def runs(folder):
    return open_runs(folder)


@pytest.fixture(scope="module")
def everything(runs):
    return runs.trajectories()


@pytest.mark.slow
@pytest.mark.parametrize("mapping, sql, condition", CASES)
def test_mapping_and_sql_select_the_same_rows_everywhere(runs, everything, mapping, sql, condition):
    expected = set(everything.traj_id[condition(everything)])
    for where in (mapping, sql):
        assert set(runs.trajectories(where).traj_id) == expected
        assert runs.count(where) == len(expected)
        assert {row["traj_id"] for row in inspect(runs, where=where).rows().to_dict("records")} == expected


@pytest.mark.slow
@pytest.mark.parametrize("mapping, sql, condition", CASES[::5])  # the test before compares all of them
def test_functions_read_exactly_the_rows_of_the_filter(runs, everything, mapping, sql, condition):
    rows = everything[condition(everything)]
    for where in (mapping, sql):
        assert analysis.measure(runs, ["pass1"], where=where).n.sum() == len(rows)
        curves = analysis.curves(runs, ["pass1", "turns"], where)
        assert curves.n.sum() == len(rows)
        means = rows.groupby(["run_id", "step"]).turns.mean()
        assert np.allclose(curves.turns, means.to_numpy(), equal_nan=True)
        assert analysis.pass_at_k(runs, (1,), where=where).n.sum() == len(rows)
        chosen = set(rows.traj_id)
        assert (
            set(analysis.failed_rollouts(runs, where).traj_id) == set(analysis.failed_rollouts(runs).traj_id) & chosen
        )
        assert set(analysis.tool_calls(runs, where).traj_id) <= set(rows.traj_id)
        assert analysis.plot_outcomes(runs, where).frame.calls.sum() == rows.outcomes.map(len).sum()
        assert analysis.problem_table(runs, where).rollouts.sum() == len(rows)
        assert analysis.count_words(runs, ["check"], where).n.sum() == len(rows)
        assert set(runs.search("answer", where, limit=1000).traj_id) == set(rows.traj_id)


def test_calls_take_their_own_columns_and_those_of_their_rollouts(runs, everything):
    wrong = set(everything.traj_id[everything.reward <= 0])
    calls = runs.calls({"correct": False})
    assert set(calls.traj_id) <= wrong and len(calls) == everything[everything.reward <= 0].outcomes.map(len).sum()
    assert set(runs.calls({"outcome": "timeout"}).outcome) == {"timeout"}
    assert set(runs.calls({"outcome": ["timeout", "exception"], "errors": True}).outcome) == {"timeout", "exception"}


def test_steps_take_only_filters_of_steps(runs):
    assert list(runs.steps({"steps": (2, 3), "run_id": "a"}).step) == [2, 3]
    assert list(runs.steps("reward_mean > 2").step) == []
    assert set(analysis.find_alerts(runs, {"steps": (1, 1)}).step) <= {1}
    for function in (runs.steps, lambda where: analysis.find_alerts(runs, where)):
        with pytest.raises(RunStoreError, match="'errors' selects rollouts"):
            function({"errors": True})
    assert selects_steps({"any": [{"step": 1}, "stage = 'one'"]}) and selects_steps("step > 1 AND run_id = 'a'")
    assert not selects_steps({"any": [{"step": 1}, "errors > 0"]}) and not selects_steps("traj_id = 'x'")


@pytest.mark.slow
def test_figures_take_every_filter(runs):
    for where in ({"errors": True}, "correct AND step > 1"):
        assert 0 < len(analysis.tool_use(runs, where)) <= len(analysis.tool_use(runs))
        assert set(analysis.token_table(runs, where).traj_id) <= set(runs.trajectories(where).traj_id)
        for plot in (analysis.plot_outcomes, analysis.plot_lengths, analysis.plot_pass_at_k, analysis.plot_tool_use):
            assert plot(runs, where=where).data
        assert analysis.plot_curves(runs, ["pass1"], where=where).data
        compared = analysis.compare(
            open_runs(runs.path, run_ids=["a"]), open_runs(runs.path, run_ids=["b"]), where=where
        )
        assert len(compared.table)


def test_every_function_with_where_is_covered():
    functions = {
        name for name in analysis.__all__ if callable(getattr(analysis, name)) and not isinstance(getattr(analysis, name), type)
        and "where" in signatures.signature(getattr(analysis, name)).parameters
    }  # fmt: skip
    functions -= {name for name in functions if name.startswith("export_")}  # tests/exchange/test_exports.py
    text = Path(__file__).read_text()
    assert [name for name in sorted(functions) if f"{name}(" not in text and f".{name}" not in text] == []


def test_notes_are_a_filter(tmp_path):
    runs = open_runs(make_run(tmp_path, "a", steps=1))
    first = runs.trajectories(columns=["traj_id"]).traj_id[0]
    write_note(tmp_path / "a", first, "a note", [])
    assert (
        list(runs.trajectories({"noted": True}).traj_id)
        == [first]
        == list(inspect(runs, {"noted": True}).rows().traj_id)
    )
    assert runs.count({"noted": False}) == runs.count() - 1
    with pytest.raises(RunStoreError, match="not in a run folder"):
        where_sql({"noted": True})


@pytest.mark.parametrize("where, message", read_cases(__file__, "filters.yaml")["invalid"])
def test_an_invalid_filter_names_its_key(runs, where, message):
    for function in (runs.trajectories, runs.count, lambda where: inspect(runs, where)):
        with pytest.raises(UserError, match=message):
            function(where)


def test_a_filter_is_valid_json_for_the_browser(runs):
    inspector = inspect(runs, {"step": np.arange(2), "run_id": pd.Index(["a"])})
    assert json.loads(json.dumps(inspector.filters)) == {"step": [0, 1], "run_id": ["a"]}
