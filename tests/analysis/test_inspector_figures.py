"""Tests of figures that are linked to an inspector, of `watch` and of static images."""

import json
import shutil
from pathlib import Path

import plotly.graph_objects as go
import pytest
from helpers.inspector_runs import write_run

from rstar_lab.analysis.figure_theme import COLOURS
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.analysis.inspector.inspector import Inspector, explore, inspect
from rstar_lab.analysis.inspector.link import LinkedFigure, link, point_filter, show_points
from rstar_lab.analysis.inspector.watch import watch
from rstar_lab.analysis.runs import open_runs
from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunWriter


def test_points_of_a_figure_list_their_rollouts(inspector: Inspector):
    figure = go.Figure()
    figure.add_scatter(x=[1, 2, 3], y=[0.1, 0.2, 0.3], name="roc")
    figure.add_bar(
        x=["ok", "timeout"],
        y=[5, 2],
        customdata=[{"outcome": "ok"}, {"outcome": "timeout"}],
        meta={"filter": {"run_id": "grpo"}},
    )
    figure.add_scatter(x=[4, 5], y=[1, 2], meta={"filter": {"kept": True}, "x": "step"})
    link(figure, inspector)
    assert [point_filter(inspector, trace, 1) for trace in figure.data] == [
        {"run_id": "roc", "step": 2}, {"run_id": "grpo", "outcome": "timeout"}, {"kept": True, "step": 5},
    ]  # fmt: skip
    show_points(inspector, figure, [(0, 1)])
    assert inspector.scope["label"] == "run roc, step 2" and len(inspector.rows()) == 32
    show_points(inspector, figure, [(0, 0), (0, 1), (2, 0)])
    assert inspector.source.count(inspector.where) == 64 + int(inspector.source.count("kept AND step = 4"))
    show_points(inspector, figure, [])
    assert inspector.scope == {} and len(inspector.rows()) == 384


def test_linking_a_figure_with_an_unknown_filter_raises(inspector: Inspector):
    figure = go.Figure().add_bar(x=[1], y=[1], customdata=[{"colour": 1}])
    with pytest.raises(UserError, match="unknown filter 'colour'"):
        link(figure, inspector)


# Following a run


@pytest.mark.slow
async def test_watch_follows_a_run_until_it_ends(tmp_path: Path):
    import asyncio

    source = open_runs(write_run(tmp_path / "made", "r", steps=2))
    rows = {
        level: source.sql(f"SELECT * EXCLUDE (run_id, stage, step) FROM {level} WHERE step = 2").to_dict("records")
        for level in ("trajectories", "transcripts")
    }
    for row in rows["trajectories"]:
        row["outcomes"] = list(row["outcomes"])
    with RunWriter.open(tmp_path / "live", "r", kind="train", recipe={}, seed=0) as writer:
        follower = watch(tmp_path / "live" / "r", every_s=0.05)
        follower.start()
        assert follower.inspector is None and "no step yet" in follower.figure.figure.layout.title.text
        writer.write_step(
            "rl", 1, trajectories=rows["trajectories"], calls=[], transcripts=rows["transcripts"], metrics={}
        )
        while follower.inspector is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert follower.inspector.source.count("TRUE") == 32
        again = watch(tmp_path / "live" / "r")
        assert again.inspector is not None, "a new kernel shows the same run"
        writer.finish("finished")
    await asyncio.wait_for(follower.task, 30)
    assert "finished, step 1" in follower.figure.figure.layout.title.text


async def test_watch_waits_for_a_job_and_moves_on_from_sft_to_rl(tmp_path: Path):
    import asyncio

    async def title(part: str) -> None:
        while part not in follower.figure.figure.layout.title.text:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    sft, rl = tmp_path / "tiny-sft", tmp_path / "tiny-rl"
    follower = watch(sft, rl, every_s=0.05)
    assert "waiting" in follower.figure.figure.layout.title.text
    follower.start()
    with RunWriter.open(tmp_path, "tiny-sft", kind="sft", recipe={}, seed=0) as writer:
        writer.write_step("sft", 1, trajectories=[], calls=[], transcripts=[], metrics={"loss": 2.0})
        await asyncio.wait_for(title("tiny-sft: running, step 1"), 30)
        assert [trace.y[0] for trace in follower.figure.figure.data] == [2.0] and follower.inspector is None
        writer.finish("finished")
    write_run(tmp_path, "tiny-rl", steps=2)
    await asyncio.wait_for(title("tiny-rl: finished, step 2"), 30)
    await asyncio.wait_for(follower.task, 30)
    assert follower.inspector is not None and follower.inspector.source.count("TRUE") == 64
    with pytest.raises(UserError, match="is not a run"):
        watch(tmp_path)


def test_the_live_page_shows_progress_speed_time_left_and_changes(tmp_path: Path):
    recipe = {"stages": [{"name": "rl", "steps": 40}]}
    with RunWriter.open(tmp_path, "r", kind="train", recipe=recipe, seed=0) as writer:
        for step in range(1, 11):
            metrics = {"loss": 2.0 - 0.1 * step, "step_s": 30.0}
            writer.write_step("rl", step, trajectories=[], calls=[], transcripts=[], metrics=metrics)
        layout = watch(tmp_path / "r").figure.figure.layout
        strip = "▰" * 2 + "▱" * 8
        assert layout.title.text == f"r: running, step 10 of 40 {strip}, 30 s/step, 15 min left"
        # The change refers to the mean of the first three losses: 1.0 - 1.8.
        assert layout.annotations[0].text.startswith("Loss<br><b>1</b>") and "-0.8 since the start" in str(layout)
        writer.finish("finished")
    assert "left" not in watch(tmp_path / "r").figure.figure.layout.title.text
    with RunWriter.open(tmp_path, "sft", kind="sft", recipe={}, seed=0) as writer:
        writer.write_step("sft", 1, trajectories=[], calls=[], transcripts=[], metrics={"loss": 2.0})
        assert watch(tmp_path / "sft").figure.figure.layout.title.text.startswith("sft: running, step 1")


def test_explore_lists_the_rollouts_of_a_click_in_each_of_its_figures(folder: Path):
    curve = go.Figure().add_scatter(x=[1, 2], y=[0.1, 0.2], meta={"filter": {"run_id": "roc"}, "x": "step"})
    bars = go.Figure().add_bar(x=["kept"], y=[1], customdata=["kept"])
    screen = explore([curve, bars], folder)
    assert [json.loads(figure["json"])["data"][0]["type"] for figure in screen.figures] == ["scatter", "bar"]
    screen._on_message(screen, {"op": "points", "figure": 0, "points": [[0, 1]]}, [])
    assert screen.scope["filter"] == {"run_id": "roc", "step": 2} and screen.reveal == 1
    screen._on_message(screen, {"op": "points", "figure": 1, "points": [[0, 0]]}, [])
    assert screen.scope["filter"] == {"sql": "kept"}
    screen._on_message(screen, {"op": "points", "figure": 1, "points": []}, [])
    assert screen.scope == {}
    again = screen.replacement()
    again.selected = "roc/1/p0/1"
    assert screen.selected == again.selected and again.figures == screen.figures
    with pytest.raises(UserError, match="1 to 3 figures, got 0"):
        explore([], folder)
    with pytest.raises(UserError, match="unknown filter 'colour'"):
        explore(go.Figure().add_bar(x=["a"], y=[1], customdata=[{"colour": "red"}]), folder)


# Figures without a kernel, and the theme


def test_linked_figures_get_the_theme_and_integer_ticks(inspector: Inspector):
    figure = go.Figure().add_scatter(x=[1, 2, 3], y=[0.1, 0.2, 0.3], name="roc")
    widget = LinkedFigure(figure, inspector)
    assert widget.figure.layout.template.layout.colorway == COLOURS
    assert widget.figure.layout.xaxis.dtick == 1
    widget.update_figure(go.Figure().add_scatter(x=[0.5, 2], y=[1, 2]))
    assert widget.figure.layout.template.layout.colorway == COLOURS and widget.figure.layout.xaxis.dtick is None


@pytest.mark.slow
def test_a_figure_without_a_notebook_server_has_an_svg_image(monkeypatch: pytest.MonkeyPatch):
    if not shutil.which("chromium") and not shutil.which("google-chrome"):
        pytest.skip("Chromium is not installed: the SVG images were NOT checked (apt-get install chromium)")
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    figure = LinkedFigure(go.Figure().add_scatter(x=[1, 2], y=[3, 4], name="roc"), None)
    bundle = figure.static_bundle()
    assert bundle["image/svg+xml"].startswith("<svg") and "text/html" not in bundle
    monkeypatch.setenv("JPY_SESSION_NAME", "notebook.ipynb")
    assert "image/svg+xml" not in figure.static_bundle(), "the page draws the figure itself"


def test_the_selection_of_a_point_is_saved_as_a_view(tmp_path):
    """A filter of a mapping stays typed, so that views, which hold no SQL, can store it."""
    write_run(tmp_path, "a", steps=2)
    figure = plot_curves(tmp_path, ["pass1"], where={"outcome": ["ok", "timeout"], "steps": (1, 2)})
    inspector = inspect(tmp_path)
    show_points(inspector, figure, [(len(figure.data) - 1, 1)])
    listed = inspector.rows().traj_id.tolist()
    inspector.save_view("point")
    inspector.show()
    inspector.show_view("point")
    assert listed and inspector.rows().traj_id.tolist() == listed and "step 2" in inspector.scope["label"]
