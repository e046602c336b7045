"""Tests of the timeline of a step: order and sums of the segments, the last rollout, steps without times or messages."""

import json
from pathlib import Path

import pytest

from rstar_lab.analysis import inspect, link, open_runs, plot_timeline
from rstar_lab.analysis.figure_theme import template
from rstar_lab.analysis.inspector.link import show_points
from rstar_lab.runs import RunStoreError, RunWriter

GOLDEN = Path(__file__).parent.parent / "golden" / "runs"


def write(folder: Path, *, messages: bool = True) -> None:
    """Write a step of two rollouts: `short` without calls (1 s), and `long` with two concurrent calls in its first turn (4 s)."""
    spoken = {"short": [1.0], "long": [1.0, 0.5]}
    rows = [
        {"traj_id": "short", "generate_s": 1.0, "tool_s": 0.0, "queue_s": 0.0},
        {"traj_id": "long", "generate_s": 1.5, "tool_s": 2.5, "queue_s": 0.5},
    ]
    calls = [
        {"traj_id": "long", "turn": 0, "index": index, "queue_s": queue_s, "run_s": run_s, "outcome": "ok"}
        for index, (queue_s, run_s) in enumerate(((0.5, 1.8), (0.1, 1.0)))
    ]
    transcripts = [
        {
            "traj_id": traj_id,
            "messages": json.dumps(
                [{"role": "user", "content": "q"}]
                + [{"role": "assistant", "content": "a", "generate_s": seconds} for seconds in turns]
            ),
        }
        for traj_id, turns in spoken.items()
    ]
    with RunWriter.open(folder, "a", kind="train", recipe={}, seed=0) as writer:
        writer.write_step(
            "rl", 1, trajectories=rows, calls=calls, transcripts=transcripts if messages else [], metrics={}
        )


def test_segments_follow_the_turns_and_end_with_the_longest_rollout(tmp_path):
    write(tmp_path)
    figure = plot_timeline(open_runs(tmp_path), "a", 1)
    rows = figure.frame
    assert [(row.traj_id, row.lane, row.kind, row.turn) for row in rows.itertuples()] == [
        ("short", 0, "generate", 0), ("short", 0, "wait", -1),
        ("long", 1, "generate", 0), ("long", 1, "queue", 0), ("long", 1, "tool", 0), ("long", 1, "generate", 1), ("long", 1, "tool", 1),
    ]  # fmt: skip
    # The calls take 2.3 s of the 2.5 s of tool time. The other 0.2 s are divided over both turns.
    assert rows.seconds.tolist() == pytest.approx([1.0, 3.0, 1.0, 0.5, 1.9, 0.5, 0.1])
    assert rows.start_s.tolist() == pytest.approx([0.0, 1.0, 0.0, 1.0, 1.5, 3.4, 3.9])
    assert figure.layout.title.text == "step 1, 2 rollouts; idle 38%"
    names = [trace.name for trace in figure.data]
    assert names == ["generate 2.5 s", "queue 0.5 s", "tool 2 s", "wait 3 s", "last rollout"]
    (star,) = (trace for trace in figure.data if trace.name == "last rollout")
    assert star.x[0] == pytest.approx(4.0) and star.y == (1,) and star.customdata[0] == {"traj_id": "long"}


def test_without_messages_a_rollout_has_one_segment_per_kind(tmp_path):
    write(tmp_path, messages=False)
    rows = plot_timeline(open_runs(tmp_path), "a", 1).frame
    of_long = rows[rows.traj_id == "long"]
    assert of_long.kind.tolist() == ["generate", "queue", "tool"] and set(of_long.turn) == {-1}
    assert of_long.seconds.tolist() == pytest.approx([1.5, 0.5, 2.0])


def test_lanes_are_a_sample_with_the_longest_rollout_and_sums_of_all():
    runs = open_runs(GOLDEN)
    stored = runs.trajectories({"run_id": "tiny_fast-rl", "step": 8})
    whole, sample = (plot_timeline(runs, "tiny_fast-rl", 8, lanes=lanes) for lanes in (192, 7))
    spent = whole.frame.groupby("kind").seconds.sum()
    assert spent["generate"] == pytest.approx(stored.generate_s.sum(), rel=1e-3)
    assert spent["queue"] + spent["tool"] == pytest.approx(stored.tool_s.sum(), rel=1e-3)
    assert sample.frame.traj_id.nunique() == 7
    slowest = stored.traj_id[(stored.generate_s + stored.tool_s).idxmax()]
    for figure in (whole, sample):
        assert figure.frame.traj_id[figure.frame.lane.idxmax()] == slowest
        assert "idle 35%" in figure.layout.title.text
        names = [trace.name for trace in figure.data]
        assert names[:4] == ["generate 189 s", "queue 62.8 s", "tool 2.71 s", "wait 134 s"]
    assert "7 of 192 rollouts" in sample.layout.title.text


def test_a_click_on_a_segment_lists_its_rollout():
    runs = open_runs(GOLDEN, run_ids=["tiny_fast-rl"])
    figure, inspector = plot_timeline(runs, "tiny_fast-rl", 8, lanes=5), inspect(runs)
    link(figure, inspector)
    show_points(inspector, figure, [(3, 2)])
    waiting = figure.frame[figure.frame.kind == "wait"].traj_id.iloc[2]
    assert inspector.rows().traj_id.tolist() == [waiting]


def test_the_figure_has_the_theme_of_light_and_dark_pages():
    figure = plot_timeline(open_runs(GOLDEN), "tiny_fast-rl", 8, lanes=5)
    assert figure.layout.template == template("light") and figure.dark().layout.template == template("dark")


def test_steps_without_rollouts_or_times_are_errors(tmp_path):
    with RunWriter.open(tmp_path, "b", kind="import", recipe={}, seed=0) as writer:
        writer.write_step("x", 1, trajectories=[{"traj_id": "t"}], calls=[], transcripts=[], metrics={})
    runs = open_runs(tmp_path)
    with pytest.raises(RunStoreError, match="run b has no measured times at step 1"):
        plot_timeline(runs, "b", 1)
    with pytest.raises(RunStoreError, match="run b has no rollouts at step 2"):
        plot_timeline(runs, "b", 2)
    with pytest.raises(ValueError, match="lanes must be at least 1"):
        plot_timeline(runs, "b", 1, lanes=0)
