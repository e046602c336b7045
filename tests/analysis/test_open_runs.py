"""Tests of data frames at four levels, also of runs that are being written."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.analysis_runs import VOCABULARY, make_run

from rstar_lab.analysis import open_runs, views
from rstar_lab.analysis.runs import model_title
from rstar_lab.analysis.views import select_files_sql
from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunReader, RunStoreError, RunWriter
from rstar_lab.runs.compact import compact

GOLDEN = Path(__file__).parents[1] / "golden" / "runs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        make_run(folder, f"run{seed}", seed=seed, steps=4)
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    return open_runs(folder)


def test_four_levels_with_ids_that_join(runs):
    table, steps, trajectories, calls = runs.runs(), runs.steps(), runs.trajectories(), runs.calls()
    assert list(table.run_id) == ["run0", "run1"]
    assert table["recipe.rl.method.roc.rule"].tolist() == ["paper", "paper"]
    assert len(steps) == 8 and len(trajectories) == 256 == table.trajectories.sum()
    assert trajectories.traj_id.is_unique
    assert set(calls.traj_id) <= set(trajectories.traj_id)
    assert set(zip(trajectories.run_id, trajectories.step, strict=True)) == set(
        zip(steps.run_id, steps.step, strict=True)
    )
    assert len(calls) == trajectories.outcomes.map(len).sum()
    means = trajectories.groupby(["run_id", "step"]).reward.mean().to_numpy()
    assert np.allclose(steps.sort_values(["run_id", "step"]).reward_mean, means)
    assert steps.update_s.eq(1.0).all()  # metrics of the trainer


def test_a_condition_is_sql_or_a_dict_of_values(runs):
    assert len(runs.trajectories("reward > 0 AND step = 2")) == len(runs.trajectories({"reward": 1.0, "step": 2}))
    assert runs.count({"run_id": ["run0"], "step": np.arange(1, 3)}) == 64
    assert runs.count({"advantage": None}) == runs.count("NOT kept")
    assert runs.count({"step": []}) == 0
    page = runs.trajectories(columns=["traj_id", "step"], order_by="step DESC, traj_id", limit=5, offset=3)
    assert list(page.columns) == ["traj_id", "step"] and len(page) == 5 and page.step.eq(4).all()
    with pytest.raises(RunStoreError, match='"rewards" not found'):
        runs.trajectories({"rewards": 1})


def test_sql_can_be_limited_to_the_files_of_steps(runs, monkeypatch):
    whole = runs.trajectories(columns=["run_id", "step"]).drop_duplicates()
    run_id, step = whole.iloc[0]
    read = []
    monkeypatch.setattr(
        views, "select_files_sql", lambda level, files: read.append(files) or select_files_sql(level, files)
    )
    found = runs.sql("SELECT DISTINCT run_id, step, correct FROM trajectories", steps=[(run_id, int(step))])
    assert set(zip(found.run_id, found.step, strict=True)) == {(run_id, step)} and len(whole) > 1
    assert [file.steps for file in read[-1]] == [(step,)]


def test_sql_sees_every_table(runs):
    found = runs.sql(
        """SELECT r.kind, count(*) AS n FROM trajectories t JOIN runs r USING (run_id)
           JOIN steps s ON s.run_id = t.run_id AND s.step = t.step WHERE t.step = ? GROUP BY ALL""",
        [1],
    )
    assert found.to_dict("records") == [{"kind": "train", "n": 64}]
    assert set(runs.sql("DESCRIBE trajectories").column_name) >= {"traj_id", "truth"}
    with pytest.raises(RunStoreError, match="the query failed"):
        runs.sql("SELEC 1")


def test_one_trajectory_has_transcript_and_tokens(runs):
    row = runs.trajectories("len(outcomes) = 2 AND kept", limit=1).iloc[0]
    messages = runs.transcript(row.traj_id)
    assert messages.role.tolist() == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert messages.turn.tolist() == [0, 0, 0, 1, 1, 2]
    assert messages.outcome.dropna().tolist() == list(row.outcomes)
    assert messages.attrs["truth"] == row.truth and messages.attrs["step"] == row.step
    tokens = runs.tokens(row.traj_id)
    assert len(tokens) == row.response_tokens and tokens.model.sum() == row.model_tokens
    assert tokens.text.tolist() == [VOCABULARY[token] for token in tokens.token_id]
    assert tokens[tokens.model].entropy.mean() == pytest.approx(row.entropy, abs=1e-3)
    assert tokens[~tokens.model].entropy.isna().all()
    assert tokens.turn.max() == 2 and tokens.turn.is_monotonic_increasing
    assert tokens[tokens.model].advantage.unique() == pytest.approx([row.advantage])
    first, second = runs.calls({"traj_id": row.traj_id}, order_by="position").position
    says = ["ok" if outcome == "ok" else "error" for outcome in row.outcomes]
    assert tokens.after[: first - 1].isna().all()
    assert (tokens.after[first:second] == says[0]).all() and (tokens.after[second:] == says[1]).all()


def test_dropped_rollout_has_no_trainer_values(runs):
    dropped = runs.trajectories("NOT kept", limit=1).iloc[0]
    tokens = runs.tokens(dropped.traj_id)
    assert tokens.trainer_log_prob.isna().all() and tokens.entropy.isna().all() and tokens.mismatch.isna().all()
    assert tokens[tokens.model].engine_log_prob.notna().all()
    assert runs.record(dropped.traj_id)["trainer_log_probs"] is None
    with pytest.raises(RunStoreError, match="no trajectory 'nobody'"):
        runs.transcript("nobody")


def test_search_finds_text_and_is_scoped(runs):
    found = runs.search("PRINT(1 + 1)", {"run_id": "run0", "step": [2, 3]})
    assert set(found.run_id) == {"run0"} and set(found.step) <= {2, 3} and len(found) > 0
    assert all("print(1 + 1)" in excerpt for excerpt in found.excerpt)
    assert runs.search('quote " and \\ backslash').empty
    assert runs.search("What is 1 + 1?", limit=3).shape[0] == 3


def test_growing_run_shows_new_steps(tmp_path):
    make_run(tmp_path, "a", steps=2, finish=False)
    runs = open_runs(tmp_path)
    assert (runs.count(), len(runs.steps()), runs.runs().status[0]) == (64, 2, "interrupted")
    with RunWriter.open(tmp_path, "a", kind="train", recipe={}, seed=0) as writer:
        assert runs.runs().status[0] == "running"
        writer.write_step(
            "two", 3, trajectories=[{"traj_id": "new", "reward": 1.0}], calls=[], transcripts=[], metrics={}
        )
        assert (runs.count(), len(runs.steps())) == (65, 3)
        writer.cut(1)
        assert (runs.count(), len(runs.steps())) == (32, 1)
    make_run(tmp_path, "b", steps=1)
    assert runs.count() == 64
    compact(tmp_path / "b")
    assert runs.count() == 64


@pytest.mark.parametrize("level", ["trajectories", "calls"])
def test_rows_of_the_first_step_appear_after_an_earlier_query(tmp_path, level):
    row = {"traj_id": "new", "reward": 1.0}
    call = {"traj_id": "new", "turn": 0, "index": 0, "outcome": "ok"}
    with RunWriter.open(tmp_path, "a", kind="train", recipe={}, seed=0) as writer:
        runs = open_runs(tmp_path)
        assert len(getattr(runs, level)()) == 0
        writer.write_step("one", 1, trajectories=[row], calls=[call], transcripts=[], metrics={})
        assert len(getattr(runs, level)()) == 1


def test_rows_of_a_merged_file_that_were_cut_are_not_counted(tmp_path):
    """A kill between cutting metrics.jsonl and cutting the files leaves rows of removed steps."""
    make_run(tmp_path, "a", steps=4)
    compact(tmp_path / "a")
    lines = (tmp_path / "a/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a/metrics.jsonl").write_text("".join(lines[:3]))
    runs = open_runs(tmp_path / "a")
    assert runs.count() == 96 and sorted(runs.calls().step.unique()) == [1, 2, 3]
    assert runs.sql("SELECT max(step) AS step FROM transcripts").step[0] == 3


def test_compaction_changes_no_query_result(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "runs")
    for run in ("run0", "run1"):
        compact(tmp_path / "runs" / run)
    one, other = open_runs(folder), open_runs(tmp_path / "runs")
    order = "run_id, step, traj_id"
    pd.testing.assert_frame_equal(one.trajectories(order_by=order), other.trajectories(order_by=order))
    traj_id = "run1/000003/2/5"
    pd.testing.assert_frame_equal(one.transcript(traj_id), other.transcript(traj_id))


def test_errors_name_the_missing_or_damaged_run(folder, tmp_path):
    with pytest.raises(RunStoreError, match="there is no folder"):
        open_runs(tmp_path / "nowhere")
    with pytest.raises(RunStoreError, match="no run 'x'; there are: run0, run1"):
        open_runs(folder, run_ids=["x"])
    assert open_runs(tmp_path).runs().empty and open_runs(tmp_path).count() == 0
    assert open_runs([folder / "run0", folder / "run1"]).count() == 256
    assert open_runs(folder, run_ids=["run1"]).count() == 128
    shutil.copytree(folder / "run0", tmp_path / "run0")
    torn = next((tmp_path / "run0/trajectories").glob("*/*.parquet"))
    torn.write_bytes(torn.read_bytes()[:-20])
    with pytest.raises(UserError, match=f"{torn.name}: truncated"):
        open_runs(tmp_path).count()


def test_runs_without_a_level_are_named(folder, tmp_path):
    shutil.copytree(folder / "run0", tmp_path / "run0")
    with RunWriter.open(tmp_path, "bare", kind="import", recipe={}, seed=0) as writer:
        writer.write_step("a", 1, trajectories=[{"traj_id": "x"}], calls=[], transcripts=[], metrics={})
    runs = open_runs(tmp_path)
    with pytest.warns(UserWarning, match="no calls are stored in bare"):
        assert len(runs.calls()) == len(open_runs(folder / "run0").calls())
    with pytest.raises(RunStoreError, match="trajectory x of run bare has no transcript"):
        runs.transcript("x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.trajectories()


def test_transcripts_are_read_only_on_request(folder, tmp_path):
    shutil.copytree(folder / "run0", tmp_path / "run0")
    for file in (tmp_path / "run0/transcripts").glob("*/*.parquet"):
        file.write_bytes(b"")
    runs = open_runs(tmp_path)
    assert len(runs.trajectories()) == 128 and len(runs.calls()) and len(runs.steps())
    with pytest.raises(UserError, match="truncated"):
        runs.transcript("run0/000001/0/0")
    assert RunReader(tmp_path / "run0").steps()


@pytest.mark.parametrize(
    ("folder", "title"),
    [
        ("runs/tiny-sft/base", "tiny-sft, base"), ("/a/runs/tiny-sft/sft/model", "tiny-sft"),
        ("/a/runs/tiny-rl/checkpoints/step=000008", "tiny-rl, step 8"), ("runs/tiny-rl/stages/grpo", "tiny-rl, stage grpo"),
        ("/h/models--Qwen--Qwen3-0.6B/snapshots/abc", "Qwen/Qwen3-0.6B"), ("/models/mine", "mine"), ("mine", "mine"), ("/", "/"),
    ],
)  # fmt: skip
def test_models_of_evaluations_have_a_name(folder, title):
    assert model_title(folder) == title


def test_the_table_of_runs_names_the_model_of_an_evaluation():
    table = open_runs(GOLDEN).runs().set_index("run_id")
    assert table.model["tiny_fast-eval-rl"] == "tiny_fast-rl, step 8" and table.model.isna()["tiny_fast-rl"]
