"""Tests of the heat map of problems by steps: values, order, the rollouts behind a cell, limits and speed."""

import time
from pathlib import Path

import plotly.graph_objects as go
import pytest
from helpers.inspector_runs import write_run

from rstar_lab.analysis import Runs, comparison, inspect, link, open_runs, plot_heatmap, problem_table
from rstar_lab.analysis.figure_theme import template
from rstar_lab.analysis.inspector.link import point_filter, show_points
from rstar_lab.runs import RunStoreError, RunWriter

GOLDEN = Path(__file__).parent.parent / "golden" / "runs"


def write(folder: Path, groups: dict[tuple[int, str], tuple[int, int]]) -> Runs:
    """Write a run with these groups: (step, problem id) to (correct rollouts, rollouts)."""
    with RunWriter.open(folder, "a", kind="train", recipe={}, seed=0) as writer:
        for step in sorted({step for step, _ in groups}):
            rows = [
                {
                    "traj_id": f"{step}-{problem}-{i}",
                    "problem_id": problem,
                    "reward": float(i < right),
                    "kept": i % 2 == 0,
                }
                for (at, problem), (right, count) in groups.items()
                if at == step
                for i in range(count)
            ]
            writer.write_step("rl", step, trajectories=rows, calls=[], transcripts=[], metrics={})
    return open_runs(folder)


def test_cells_are_pass_rates_of_groups_with_the_easiest_problem_on_top(tmp_path):
    runs = write(tmp_path, {(1, "hard"): (0, 4), (1, "it's"): (3, 4), (2, "hard"): (1, 4), (4, "it's"): (2, 2)})
    figure = plot_heatmap(runs, "a")
    heatmap = figure.data[0]
    assert list(heatmap.y) == ["hard", "it&#x27;s"] and list(heatmap.x) == ["1", "2", "4"]
    assert [list(row) for row in heatmap.z] == [[0.0, 0.25, None], [0.75, None, 1.0]]
    assert figure.frame.to_dict("records")[1] == {
        "problem_id": "hard", "step": 2, "n": 4, "pass_rate": 0.25, "kept": 2, "row": 0,
    }  # fmt: skip
    assert sorted(runs.trajectories(figure.where(0, [(1, 2)])).traj_id) == ["4-it's-0", "4-it's-1"]
    assert runs.trajectories(figure.where(0, [(0, 2)])).empty, "an empty cell has no rollouts"
    assert figure.layout.template == template("light") and figure.dark().layout.template == template("dark")


def test_rollouts_without_a_valid_reward_are_not_failures(tmp_path):
    row = {"step": 1, "problem_id": "p", "reward": 1.0, "stop_reason": "answered"}
    rows = [row | {"traj_id": "a"}, row | {"traj_id": "b", "reward": 0.0, "stop_reason": "undecided"}]
    with RunWriter.open(tmp_path, "a", kind="train", recipe={}, seed=0) as writer:
        writer.write_step("rl", 1, trajectories=rows, calls=[], transcripts=[], metrics={})
    runs = open_runs(tmp_path)
    assert plot_heatmap(runs, "a").frame[["n", "pass_rate"]].values.tolist() == [[1, 1.0]]
    columns = ["rollouts", "pass_rate", "first_rate", "last_rate"]
    assert problem_table(runs)[columns].values.tolist() == [[2, 1.0, 1.0, 1.0]]
    assert comparison._examples(runs, None, {"p": False}) == [None]


def test_more_problems_than_rows_show_those_of_the_most_steps(tmp_path):
    groups = {(step, problem): (1, 2) for step, problem in ((1, "once"), (1, "twice"), (2, "twice"))}
    figure = plot_heatmap(write(tmp_path, groups), "a", problems=1)
    assert set(figure.frame.problem_id) == {"twice"} and "1 of 2 problems" in figure.layout.title.text


def test_problems_that_never_recur_are_sorted_within_each_step():
    runs = open_runs(GOLDEN)
    figure = plot_heatmap(runs, "tiny_fast-rl")
    columns = list(zip(*figure.data[0].z, strict=True))
    assert len(columns) == 8 and all(len(column) == 12 and list(column) == sorted(column) for column in columns)
    for place in ((0, 0), (11, 6)):
        rows = runs.trajectories(figure.where(0, [place]))
        assert (rows.reward > 0).mean() == figure.data[0].z[place[0]][place[1]] and rows.problem_id.nunique() == 1
    fewer = plot_heatmap(runs, "tiny_fast-rl", problems=5).frame
    assert fewer.groupby("step").row.apply(list).tolist() == [[0, 1, 2, 3, 4]] * 8


def test_a_click_on_a_cell_lists_its_group(tmp_path):
    write_run(tmp_path, "roc")
    runs = open_runs(tmp_path)
    figure, inspector = plot_heatmap(runs, "roc"), inspect(runs)
    widget = link(figure, inspector)
    widget._on_points(widget, {"op": "points", "points": [[0, [2, 3]]]}, [])
    problem = figure.data[0].y[2]
    assert inspector.scope["label"] == f"run roc, step 4, problem {problem}"
    rows = inspector.rows()
    assert len(rows) == 8 and set(rows.problem_id) == {problem} and set(rows.step) == {4}


def test_axes_of_a_heat_map_name_the_columns_of_a_cell(tmp_path):
    write_run(tmp_path, "roc")
    inspector = inspect(open_runs(tmp_path))
    meta = {"filter": {"run_id": "roc"}, "x": "step", "y": "problem_id"}
    figure = go.Figure(go.Heatmap(z=[[0, 1], [1, 0]], x=[1, 2], y=["sum_00", "sum_01"], meta=meta))
    link(figure, inspector)
    assert point_filter(inspector, figure.data[0], (1, 0)) == {"run_id": "roc", "step": 1, "problem_id": "sum_01"}
    show_points(inspector, figure, [(0, (1, 0))])
    assert len(inspector.rows()) == 8


def test_runs_without_problems_are_an_error(tmp_path):
    with RunWriter.open(tmp_path, "a", kind="import", recipe={}, seed=0) as writer:
        writer.write_step("x", 1, trajectories=[{"traj_id": "t"}], calls=[], transcripts=[], metrics={})
    with pytest.raises(RunStoreError, match="run a has no rollouts with a problem id and a reward"):
        plot_heatmap(open_runs(tmp_path), "a")
    with pytest.raises(ValueError, match="problems must be at least 1"):
        plot_heatmap(open_runs(tmp_path), "a", problems=0)


@pytest.mark.slow
def test_forty_thousand_rollouts_take_less_than_two_seconds(tmp_path):
    groups = {(step, f"p{problem:03d}"): (step % 17, 16) for step in range(50) for problem in range(50)}
    runs = write(tmp_path, groups)
    inspector = inspect(runs)
    started = time.process_time()
    figure = plot_heatmap(runs, "a")
    link(figure, inspector)
    assert time.process_time() - started < 2
    assert len(figure.frame) == 2500 and figure.frame.n.sum() == 40_000
