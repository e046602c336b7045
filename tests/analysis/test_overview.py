"""Tests of the overview of runs: rows, sparklines, growth of a run, selection and damaged runs."""

from pathlib import Path

import pytest
from helpers.analysis_runs import make_run
from helpers.inspector_runs import write_run, write_steps

from rstar_lab.analysis import open_runs, overview
from rstar_lab.analysis.ablation import ablation_report, ablation_sums
from rstar_lab.analysis.inspector.link import show_points
from rstar_lab.analysis.inspector.overview import COLUMNS, OverviewRow, OverviewRows, render_overview, sparkline
from rstar_lab.analysis.metrics import curves
from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunWriter


def test_rows_hold_the_curves_of_the_run_store(folder: Path):
    rows = {row.run_id: row for row in OverviewRows(folder).read()}
    assert set(rows) == {"grpo", "roc"}
    frame = curves(open_runs(folder / "roc"), ["pass1", "response_tokens"])
    assert rows["roc"].series["pass1"] == frame.pass1.tolist()
    assert rows["roc"].series["response_tokens"] == frame.response_tokens.tolist()
    assert (rows["roc"].state, rows["roc"].step, rows["roc"].trajectories) == ("finished", 6, 192)
    assert all(len(row.cells()) == len(COLUMNS) for row in rows.values())


def test_recipe_keys_that_differ_are_shown_and_name_the_arms_of_a_sweep(tmp_path: Path):
    for seed, (run_id, roc) in enumerate({"a": "paper", "b": "paper", "c": "none"}.items()):
        make_run(tmp_path, run_id, steps=2, seed=seed, roc=roc)
    arms = {name: f"rl.method.roc.rule={name}" for name in ("paper", "none")}
    rows = {row.run_id: row.changes for row in OverviewRows(tmp_path).read()}
    assert rows == {"a": arms["paper"], "b": arms["paper"], "c": arms["none"]}
    report = ablation_report(ablation_sums(open_runs(tmp_path), ["pass1"]), control=arms["paper"])
    assert report.arms == [*arms.values()]


def test_text_of_a_run_is_escaped():
    row = OverviewRow("<b>x</b>", "running", alerts=('"><script>',), parent="<i>\u202e")
    page = render_overview([row])
    assert not any(mark in page for mark in ("<b>", "<script>", "<i>", "\u202e")) and "&lt;b&gt;" in page


def test_sparkline_has_at_most_40_points_and_ends_with_the_last_value():
    assert len(sparkline("pass1", [step / 1000 for step in range(1000)])["points"].split()) == 40
    assert sparkline("pass1", [0.1, 0.25])["text"] == "25.0%"
    assert sparkline("pass1", []) == {"text": ""}


@pytest.mark.slow
def test_refresh_shows_new_steps_and_new_runs_and_reads_only_changed_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_run(tmp_path, "done")
    shown = overview(tmp_path, selected=["done"])
    writing = write_steps(tmp_path, "live", steps=3)
    next(writing)
    read: list[list[str]] = []
    from rstar_lab.analysis.inspector import overview as module

    original = module._read_readable
    monkeypatch.setattr(
        module, "_read_readable", lambda folders: read.append([f.name for f in folders]) or original(folders)
    )
    shown.refresh()
    live = next(row for row in shown.rows if row.run_id == "live")
    assert (live.state, live.step) == ("running", 1)
    assert read == [["live"]]
    shown.refresh()
    assert read == [["live"]]
    shown.table.selected = ["done", "live"]
    before = shown.figure.figure_json
    for _ in writing:
        pass
    shown.refresh()
    live = next(row for row in shown.rows if row.run_id == "live")
    assert (live.state, live.step) == ("finished", 3)
    assert shown.figure.figure_json != before
    assert [run_id for run_id, _ in shown.table.table_rows] == ["live", "done"]


@pytest.mark.slow
def test_selected_runs_are_overlaid_and_a_point_lists_its_rollouts(folder: Path):
    shown = overview(folder, selected=["grpo"])
    assert {trace.name for trace in shown.figure.figure.data if trace.name} == {"grpo"}
    shown.selected = ["grpo", "roc"]
    assert shown.table.selected == shown.selected and shown.to_html() == render_overview(shown.rows)
    figure = shown.figure.figure
    assert {trace.name for trace in figure.data if trace.name} == {"grpo", "roc"}
    number = next(place for place, trace in enumerate(figure.data) if trace.name == "roc")
    assert shown.inspector is not None
    show_points(shown.inspector, figure, [(number, 2)])
    assert shown.inspector.scope["filter"] == {"run_id": ["roc"], "step": 3}
    assert set(shown.inspector.rows().run_id) == {"roc"}
    shown.table.selected = []
    assert "No run with steps" in shown.figure.figure_json


@pytest.mark.slow
def test_a_damaged_run_is_shown_as_unreadable(tmp_path: Path):
    write_run(tmp_path, "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("{")
    rows = {row.run_id: row for row in overview(tmp_path).rows}
    assert rows["bad"].state == "unreadable" and "run.json" in rows["bad"].error
    assert rows["good"].state == "finished"


def test_static_output_has_all_runs_and_no_script(folder: Path):
    text = render_overview(overview(folder).rows)
    assert "grpo" in text and "roc" in text and text.count("<svg") >= 8 and "<script" not in text


def test_unknown_run_and_interval_are_rejected(folder: Path):
    with pytest.raises(UserError, match="no run 'nope'"):
        overview(folder, selected=["nope"])
    with pytest.raises(UserError, match="every_s"):
        overview(folder, every_s=0)


@pytest.mark.slow
def test_the_folder_of_one_run_has_one_row():
    golden = Path(__file__).parent.parent / "golden" / "runs" / "tiny_fast-rl"
    shown = overview(golden)
    assert [row.run_id for row in shown.rows] == shown.selected == ["tiny_fast-rl"]
    assert shown.inspector is not None and shown.inspector.source.count("TRUE") == 1536


def test_the_first_selected_run_is_the_newest_with_a_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    times = iter(f"2026-01-0{day}T00:00:00+00:00" for day in range(1, 10))
    monkeypatch.setattr("rstar_lab.runs.writer._now", lambda: next(times))
    for run_id, steps in (("older", 2), ("trained", 2), ("evaluated", 1)):
        write_run(tmp_path, run_id, steps=steps, problems=1)
    assert overview(tmp_path).selected == ["trained"]
    writing = write_steps(tmp_path, "started", problems=1)
    next(writing)
    assert overview(tmp_path).selected == ["started"]


def test_a_training_is_followed_from_the_loss_of_its_sft_to_its_rollouts(tmp_path: Path):
    with RunWriter.open(tmp_path, "one-sft", kind="train", recipe={}, seed=0) as writer:
        for step in (1, 2):
            writer.write_step("sft", step, trajectories=[], calls=[], transcripts=[], metrics={"loss": 1 / step})
    shown = overview(tmp_path)
    assert shown.selected == ["one-sft"] and [list(trace.y) for trace in shown.figure.figure.data] == [[1, 0.5]]
    for run_id, kind in (("one-held_out-base", "evaluate"), ("one-rl", "train")):
        write_run(tmp_path, run_id, kind=kind, steps=2, problems=1)
        shown.refresh()
        assert shown.selected == [run_id] and shown.inspector is not None


def test_runs_that_start_in_the_same_second_have_a_fixed_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rstar_lab.runs.writer._now", lambda: "2026-01-01T00:00:00+00:00")
    for run_id in ("b", "c", "a"):
        write_run(tmp_path, run_id, steps=1, problems=1)
    assert [row.run_id for row in OverviewRows(tmp_path).read()] == ["c", "b", "a"]


def test_evaluations_and_forks_follow_the_run_that_they_belong_to():
    from rstar_lab.analysis.inspector.overview import _under_their_runs

    rows = [
        OverviewRow("alone", "finished", kind="evaluate", model="/elsewhere/model"),
        OverviewRow("sft", "finished", kind="train", parent_run="base"),
        OverviewRow("fork", "finished", kind="fork", parent_run="test"),
        OverviewRow("test", "finished", kind="evaluate", model="/runs/rl/checkpoints/step=000002"),
        OverviewRow("a", "finished", kind="evaluate", parent_run="b"),
        OverviewRow("b", "finished", kind="evaluate", parent_run="a"),
        OverviewRow("held_out", "finished", kind="evaluate", parent_run="rl"),
        OverviewRow("rl", "finished", kind="train", parent_run="sft"),
    ]
    shown = _under_their_runs(rows)
    assert [(row.run_id, row.under) for row in shown] == [
        ("alone", ""), ("sft", ""), ("a", ""), ("b", ""), ("rl", ""), ("fork", "rl"), ("test", "rl"), ("held_out", "rl"),
    ]  # fmt: skip
    assert render_overview(shown).count("padding-left") == 3
