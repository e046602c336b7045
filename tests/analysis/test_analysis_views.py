"""Tests of the resampling replay, problem histories, step profiles and token tables on runs with known content."""

import json

import numpy as np
import pytest
from helpers.analysis_runs import make_run

from rstar_lab.analysis.problem_histories import compare_transcripts, problem_history, problem_table
from rstar_lab.analysis.resampling_replay import group_rollouts, plot_replays, replay
from rstar_lab.analysis.runs import open_runs
from rstar_lab.analysis.step_profile import plot_time, profile_step
from rstar_lab.analysis.tokens import (
    KINDS,
    count_words,
    plot_entropy,
    plot_high_entropy_words,
    plot_token_kinds,
    token_kinds,
    token_table,
    word_list,
)
from rstar_lab.runs import RunStoreError, RunWriter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder, "paper", steps=4, problems=6, seed=1)
    make_run(folder, "released", steps=3, problems=6, seed=2, roc="released")
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    return open_runs(folder)


# Resampling replay


def test_group_rollouts_have_penalties_and_selection(runs):
    row = runs.trajectories("kept AND run_id = 'paper'", limit=1).iloc[0]
    frame = group_rollouts(runs, row.traj_id)
    assert len(frame) == 8 and frame.kept.sum() == 4
    assert frame.penalty.tolist() == (frame.p_err + frame.p_format).tolist()
    assert set(frame.selection) == {"kept", "dropped by resampling"}


def test_replay_of_the_released_rule_equals_the_trained_batch(runs):
    found = replay(runs, "released", 2, rule="released")
    assert (found.rows.kept_share == found.rows.kept).all()
    trained, again = found.summary.iloc[0], found.summary.iloc[1]
    for name in ("rollouts", "groups", "error_rate", "error_rate_correct", "response_tokens"):
        assert trained[name] == again[name] or np.isnan(trained[name])


def test_replays_of_other_rules_change_penalties_and_advantages(runs):
    paper = replay(runs, "paper", 1, draws=60)
    blind = replay(runs, "paper", 1, rule="random", draws=60)
    everything = replay(runs, "paper", 1, rule="none")
    assert paper.summary.penalty_correct[1] < blind.summary.penalty_correct[1]
    step = runs.trajectories({"run_id": "paper", "step": 1})
    unequal = step.groupby("group_id").reward.transform("nunique") > 1
    assert everything.summary.rollouts[1] == unequal.sum()
    part = step[unequal]
    advantage = (part.reward - part.groupby("group_id").reward.transform("mean")) / (
        part.groupby("group_id").reward.transform("std") + 1e-6
    )
    found = everything.rows.set_index("traj_id").loc[part.traj_id].new_advantage
    assert np.allclose(found, advantage)
    assert paper.rows.kept_share.between(0, 1).all()
    shown = plot_replays([paper, blind, everything])
    assert shown.frame.batch.tolist() == ["as trained", "paper", "random", "none"]


def test_weights_and_the_substring_rule_change_the_penalty(runs):
    only_format = replay(runs, "paper", 1, weights=(0.0, 2.0), draws=2)
    rows = only_format.rows
    assert np.allclose(rows.penalty, 2 * rows.p_format)
    substring = replay(runs, "paper", 1, errors="substring", draws=2).rows.set_index("traj_id")
    for traj_id, row in list(substring.iterrows())[:20]:
        messages = runs.transcript(traj_id)
        responses = messages[messages.role == "tool"].content
        wanted = responses.str.contains("error").mean() if len(responses) else 0.5
        assert row.p_err == pytest.approx(wanted)
    with pytest.raises(RunStoreError, match="has no step 99"):
        replay(runs, "paper", 99)


# Problem history


def test_problem_history_has_pass_rates_events_and_code(runs):
    history = problem_history(runs, "p1")
    assert history.question == "What is 1 + 1?" and history.truth == "2"
    rows = runs.trajectories({"problem_id": "p1"})
    rates = (rows.reward > 0).groupby([rows.run_id, rows.step]).mean()
    assert history.strip.set_index(["run_id", "step"]).pass_rate.to_dict() == pytest.approx(rates.to_dict())
    for run_id, of_run in rates.groupby("run_id"):
        first = of_run[of_run > 0].index[0][1]
        event = history.events[(history.events.run_id == run_id) & (history.events.event == "first solve")].iloc[0]
        assert event.step == first
        assert runs.trajectory(event.traj_id).reward > 0
    assert history.code[history.code.step == history.code.step.min()].new.all()
    figure = history.plot()
    condition = figure.where(0, [(0, 1)])
    assert set(runs.trajectories(condition).problem_id) == {"p1"}
    with pytest.raises(RunStoreError, match="no rollout of problem 'p77'"):
        problem_history(runs, "p77")


def test_a_problem_that_is_no_longer_solved_is_an_event(tmp_path):
    with RunWriter.open(tmp_path, "a", kind="train", recipe={}, seed=0) as writer:
        for step, passed in enumerate((0, 0, 3, 4, 1, 3)):
            rows = [{"traj_id": f"{step}-{i}", "problem_id": "p", "reward": float(i < passed)} for i in range(4)]
            writer.write_step("rl", step, trajectories=rows, calls=[], transcripts=[], metrics={})
    events = problem_history(open_runs(tmp_path), "p").events
    assert list(zip(events.event, events.step, strict=True)) == [
        ("first solve", 2), ("solved", 2), ("forgotten", 4), ("solved", 5),
    ]  # fmt: skip
    table = problem_table(open_runs(tmp_path))
    assert table.to_dict("records") == [
        {
            "problem_id": "p",
            "runs": 1,
            "rollouts": 24,
            "pass_rate": 11 / 24,
            "first_rate": 0,
            "last_rate": 0.75,
            "change": 0.75,
        }
    ]


def test_compared_transcripts_mark_differences_and_escape_markup(tmp_path):
    hostile = "<script>alert(1)</script>\n<img src=x onerror=alert(2)>"
    with RunWriter.open(tmp_path, "a", kind="train", recipe={}, seed=0) as writer:
        for step, text in enumerate(("same\nold line", f"same\n{hostile}")):
            messages = json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": text}])
            writer.write_step(
                "rl", step, trajectories=[{"traj_id": f"t{step}", "reward": 1.0}], calls=[],
                transcripts=[{"traj_id": f"t{step}", "messages": messages}], metrics={},
            )  # fmt: skip
    html = compare_transcripts(open_runs(tmp_path), "t0", "t1")
    assert "<script" not in html and "<img" not in html
    assert "- old line" in html and "+ &lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert html.count(">same<") == 2


# Step profile


def test_phases_add_up_and_stragglers_are_the_slowest(runs):
    found = profile_step(runs, "paper", 2, stragglers=3)
    assert found.step_s == pytest.approx(4.0)
    # Tool time is part of the rollout phase. Time outside of all phases is the rest.
    assert found.phases.set_index("phase").seconds.to_dict() == pytest.approx(
        {"rollout": 2.0, "verify": 0.1, "log-probs": 0.3, "update": 1.0, "wait": 0.1, "rest": 0.5}
    )
    assert found.phases.share.sum() == pytest.approx(1)
    rows = runs.trajectories({"run_id": "paper", "step": 2})
    seconds = rows.generate_s + rows.tool_s
    assert found.stragglers.seconds.tolist() == pytest.approx(sorted(seconds, reverse=True)[:3])
    assert found.rollout.share.sum() == pytest.approx(1) and found.engines.rollouts.sum() == 48
    assert found.tail_share == pytest.approx(1 - np.quantile(seconds, 0.9) / seconds.max(), rel=1e-5)
    assert found.idle == {}
    frame = plot_time(runs, "paper").frame
    assert frame.groupby("step").seconds.sum().tolist() == pytest.approx([4.0] * 4)


def test_profile_has_measured_idle_times_and_requires_step_times(tmp_path):
    make_run(tmp_path, "a", steps=1, extra_metrics={"engine_idle_share": 0.25})
    assert profile_step(open_runs(tmp_path), "a", 1).idle == {"engine_idle_share": 0.25}
    with RunWriter.open(tmp_path, "b", kind="import", recipe={}, seed=0) as writer:
        writer.write_step("x", 1, trajectories=[{"traj_id": "t"}], calls=[], transcripts=[], metrics={})
    with pytest.raises(RunStoreError, match="no measured times at step 1"):
        profile_step(open_runs(tmp_path), "b", 1)


# Tokens


def one_transcript(tmp_path, pieces, token_arrays=True):
    """Write a run of one kept trajectory. pieces: (text, generated by the model, entropy)."""
    vocabulary = sorted({text for text, _, _ in pieces})
    ids = [vocabulary.index(text) for text, _, _ in pieces]
    position = next(i for i, (_, own, _) in enumerate(pieces) if not own)
    arrays = {
        "response_ids": ids,
        "loss_mask": [own for _, own, _ in pieces],
        "entropy": [entropy for _, _, entropy in pieces],
        "engine_log_probs": [-1.0] * len(ids),
        "trainer_log_probs": [-1.5] * len(ids),
    }
    with RunWriter.open(tmp_path, "a", kind="train", recipe={}, seed=0) as writer:
        writer.write_vocabulary(vocabulary)
        writer.write_step(
            "rl",
            1,
            trajectories=[{"traj_id": "t", "reward": 1.0, "entropy": 0.5, "calls": 1, "outcomes": ["exception"]}],
            calls=[{"traj_id": "t", "turn": 0, "index": 0, "outcome": "exception", "position": position}],
            transcripts=[{"traj_id": "t", "messages": "[]", **(arrays if token_arrays else {})}],
            metrics={},
        )
    return open_runs(tmp_path)


def test_token_table_has_kind_code_and_word_of_each_token(tmp_path):
    runs = one_transcript(
        tmp_path,
        [
            ("Let", True, 0.1), (" me", True, 0.2), (" double", True, 3.0), ("-check", True, 0.1), ("<tool_call>", True, 0.1),
            ("print", True, 2.5), ("</tool_call>", True, 0.1), ("boom", False, 9.0), (" Oops", True, 2.0), (",", True, 0.1),
            (" done", True, 0.1),
        ],
    )  # fmt: skip
    table = token_table(runs, top=0.3)
    assert table.text.tolist() == [
        "Let", " me", " double", "-check", "<tool_call>", "print", "</tool_call>", " Oops", ",", " done",
    ]  # fmt: skip
    assert table.kind.tolist() == [KINDS[0]] * 7 + [KINDS[2]] * 3  # the exception came before the last three
    assert table[table.code].text.tolist() == ["<tool_call>", "print", "</tool_call>"]
    assert table[table.listed].text.tolist() == [" double", "-check", " Oops"]
    assert table[table.high].text.tolist() == [" double", "print", " Oops"]
    assert table.mismatch.tolist() == pytest.approx([0.5] * 10)
    words = word_list(table, min_count=1)
    assert words.word.tolist()[:3] == ["double-check", "oops", "me"]
    assert words[words.word == "oops"].iloc[0].after_error == 1.0
    assert token_table(runs, words=["done"]).pipe(lambda frame: frame[frame.listed]).text.tolist() == [" done"]


def test_token_kinds_add_up_to_the_sample(runs):
    table = token_table(runs, {"run_id": "paper"}, limit=40)
    assert table.traj_id.nunique() == 40
    assert table.high.mean() == pytest.approx(0.2, abs=0.01)
    found = token_kinds(table)
    assert found.share.sum() == pytest.approx(1) and found.high_part.sum() == pytest.approx(1)
    assert set(found.kind) == set(KINDS)
    for figure in (plot_token_kinds(table), plot_high_entropy_words(table), plot_entropy(table)):
        assert len(figure.frame)
    again = token_table(runs, {"run_id": "paper"}, limit=40)
    assert again.equals(table)  # a fixed sample


def test_words_are_counted_only_in_the_models_text(runs):
    counted = count_words(runs, ["let me"], {"run_id": "paper"})
    calls = runs.trajectories({"run_id": "paper"})
    assert counted.uses.sum() == calls.outcomes.map(len).sum()  # one use before each call
    assert count_words(runs, ["what is"], {"run_id": "paper"}).uses.sum() == 0  # words of the question do not count


def test_missing_token_arrays_are_an_error_with_the_recipe_key(tmp_path):
    runs = one_transcript(tmp_path, [("a", True, 1.0), ("b", False, 0.0)], token_arrays=False)
    with pytest.raises(RunStoreError, match="token_arrays"):
        token_table(runs)
    with pytest.raises(RunStoreError, match="token_arrays"):
        runs.tokens("t")
