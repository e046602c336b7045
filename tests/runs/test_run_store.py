"""Tests of writing and reading runs."""

import json
import math
from asyncio import CancelledError
from signal import SIGTERM

import numpy as np
import pyarrow as pa
import pytest
from helpers.run_rows import rows

from rstar_lab.common.errors import UserError
from rstar_lab.runs import CALLS, TRAJECTORIES, TRANSCRIPTS, RunReader, RunStoreError, RunWriter

TRAIN = {"kind": "train", "recipe": {"seed": 0}, "seed": 0}


@pytest.fixture
def run(tmp_path):
    """A run of three steps over two stages."""
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        for step, stage in enumerate(("sft", "rl", "rl")):
            writer.write_step(stage, step, **rows(step), metrics={"loss": 1.0 / (step + 1)})
        writer.finish("finished", result={"pass1": 0.5})
    return tmp_path / "a"


def test_rows_are_read_as_written_with_run_attempt_stage_and_step(run):
    table = RunReader(run).read("trajectories").to_pylist()
    wanted = rows(1)["trajectories"][5]
    (found,) = (row for row in table if row["traj_id"] == wanted["traj_id"])
    assert found == wanted | {"run_id": "a", "attempt": 1, "stage": "rl", "step": 1}
    assert [row["step"] for row in table] == sorted(row["step"] for row in table)
    assert len(table) == 24
    for level, schema in (("trajectories", TRAJECTORIES), ("calls", CALLS), ("transcripts", TRANSCRIPTS)):
        assert RunReader(run).read(level).schema == schema


def test_token_arrays_keep_values_and_nulls(run):
    table = RunReader(run).read("transcripts").to_pylist()
    kept = next(row for row in table if row["traj_id"] == "r/000001/0001")
    dropped = next(row for row in table if row["traj_id"] == "r/000001/0000")
    wanted = rows(1)["transcripts"][1]
    assert kept["response_ids"] == wanted["response_ids"]
    assert kept["loss_mask"] == wanted["loss_mask"]
    assert np.allclose(kept["trainer_log_probs"], wanted["trainer_log_probs"], atol=2e-3)
    assert dropped["trainer_log_probs"] is None
    assert dropped["entropy"] is None
    assert dropped["engine_log_probs"] is not None


def test_pass1_leaves_out_rollouts_that_the_infrastructure_failed(tmp_path):
    from rstar_lab.analysis import open_runs

    data = rows(1)
    reasons = ["engine_error", "environment_error", "undecided"]
    for row, reason in zip(data["trajectories"], reasons, strict=False):
        row |= {"stop_reason": reason, "reward": 0.0}
    left = [row["reward"] > 0 for row in data["trajectories"][len(reasons) :]]
    recipe = {"name": "r", "model": "tiny"}
    with RunWriter.open(tmp_path, "r-rl", kind="train", recipe=recipe, seed=0) as writer:
        writer.write_step("rl", 1, **data, metrics={})
    rollup = RunReader(tmp_path / "r-rl").rollup().to_pandas().iloc[0]
    assert (rollup.correct_n, rollup.correct_mean) == (len(left), np.mean(left))
    runs = open_runs(tmp_path)
    assert runs.sql("SELECT avg(correct::INT) AS rate, count(correct) AS n FROM trajectories").iloc[0].tolist() == [
        np.mean(left), len(left)
    ]  # fmt: skip


def test_rollup_has_n_mean_and_sd_without_infrastructure_failures(run):
    rollup = RunReader(run).rollup().to_pandas().set_index("step")
    trajectories = RunReader(run).read("trajectories").to_pandas()
    step = trajectories[trajectories.step == 1]
    assert rollup.loc[1, "reward_mean"] == step.reward.mean()
    assert rollup.loc[1, "reward_sd"] == pytest.approx(step.reward.std())
    assert rollup.loc[1, "entropy_n"] == step.entropy.notna().sum() < 8
    # outcomes by sample: none, ok, ok+exception, ok+exception+sandbox_error, twice
    assert rollup.loc[1, "calls_mean"] * 8 == 10
    assert rollup.loc[1, "errors_mean"] * 8 == 4
    assert rollup.loc[1, "correct_calls_mean"] * rollup.loc[1, "correct_calls_n"] == 6


def test_nan_becomes_null(tmp_path):
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        step = rows(0)
        step["trajectories"][0]["entropy"] = math.nan
        step["trajectories"][0]["reward"] = np.float32(1.0)
        metrics = {"loss": math.nan, "gap": -math.inf, "nested": [np.float64(2.0), {"x": math.inf}]}
        writer.write_step("rl", 0, **step, metrics=metrics)
    assert RunReader(tmp_path / "a").metrics() == [
        {"stage": "rl", "step": 0, "loss": None, "gap": None, "nested": [2.0, {"x": None}]}
    ]
    assert RunReader(tmp_path / "a").read("trajectories")["entropy"][0].as_py() is None
    assert "NaN" not in (tmp_path / "a" / "metrics.jsonl").read_text()


def test_hostile_text_is_stored_as_text(tmp_path):
    text = 'a\x00b</script>\ud800"\n\u2028'
    step = rows(0)
    step["transcripts"][0]["question"] = text
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        writer.write_step("rl", 0, **step, metrics={"note": "\u2028 \n"})
    reader = RunReader(tmp_path / "a")
    assert reader.read("transcripts")["question"][0].as_py() == text.replace("\ud800", "?")
    assert reader.metrics()[0]["note"] == "\u2028 \n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "unknown column 'colour'"),
        ({"traj_id": None}, "traj_id is missing"),
        ({"reward": "high"}, "column 'reward'"),
        ({"turns": 10**6}, "column 'turns'"),
        ({"outcomes": ["fine"]}, "unknown outcome 'fine'"),
    ],
)
def test_invalid_row_is_rejected_and_nothing_is_written(tmp_path, change, message):
    step = rows(0)
    step["trajectories"][3] |= change
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        with pytest.raises(ValueError, match=message):
            writer.write_step("rl", 0, **step, metrics={})
        writer.write_step("rl", 0, **rows(0), metrics={})
    assert RunReader(tmp_path / "a").read("trajectories").num_rows == 8


def test_step_numbers_must_increase(run):
    with RunWriter.open(run.parent, "a", **TRAIN) as writer:
        with pytest.raises(ValueError, match="step 2 does not come after step 2"):
            writer.write_step("rl", 2, **rows(2), metrics={})


def test_resumed_run_cuts_later_steps_and_shows_one_attempt_per_step(run):
    with RunWriter.open(run.parent, "a", **TRAIN) as writer:
        assert writer.attempt == 2
        writer.cut(0)
        assert writer.last_step == 0
        assert RunReader(run).steps() == {0: "sft"}
        assert not list(run.glob("*/stage=rl/*"))
        writer.write_step("rl", 1, **rows(1), metrics={})
    table = RunReader(run).read("trajectories").to_pandas()
    assert table.groupby("step").attempt.unique().map(list).to_dict() == {0: [1], 1: [2]}
    assert RunReader(run).rollup()["attempt"].to_pylist() == [1, 2]
    assert RunReader(run).info["attempts"] == 2


def test_a_step_may_have_no_rows(tmp_path):
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        writer.write_step("sft", 10, trajectories=[], calls=[], transcripts=[], metrics={"loss": 2.0})
    reader = RunReader(tmp_path / "a")
    assert reader.steps() == {10: "sft"}
    assert reader.files("trajectories") == []
    assert reader.read("calls").num_rows == 0


def test_checkpoints_are_complete_or_absent(tmp_path):
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        assert writer.latest_checkpoint() is None
        for step in (2, 4, 10):
            writer.write_step("rl", step, **rows(step), metrics={})
            with writer.checkpoint(step) as folder:
                (folder / "sub").mkdir()
                (folder / "sub" / "weights").write_bytes(b"w" * step)
        with pytest.raises(RuntimeError), writer.checkpoint(12) as folder:
            (folder / "weights").write_bytes(b"half")
            raise RuntimeError
        assert writer.latest_checkpoint() == (10, tmp_path / "a/checkpoints/step=000010")
        nearest = [RunReader(tmp_path / "a").nearest_checkpoint(step).name for step in (1, 3, 4, 5, 7, 8, 9)]
        assert [int(name[-2:]) for name in nearest] == [2, 2, 2, 4, 4, 4, 10], "step 4 was generated after update 3"
        writer.keep_checkpoints(2)
        assert list(RunReader(tmp_path / "a").checkpoints()) == [4, 10]
        writer.cut(5)
        assert writer.latest_checkpoint()[0] == 4
    assert sorted(path.name for path in (tmp_path / "a/checkpoints").iterdir()) == ["step=000004"]


def test_run_json_has_provenance_and_no_secrets(tmp_path):
    recipe = {
        "model": "tiny",
        "hub": {"hf_token": "hf_abcdefghijklmnopqrstuvwxyz", "eos_token": "<|im_end|>", "max_tokens": 10},
        "urls": ["https://me:word@host/v1"],
        "note": "key sk-abcdefghijklmnopqrst",
        "rl": {"token_arrays": "kept"},
    }
    parent = {"run": "base", "step": 3}
    with RunWriter.open(
        tmp_path, "a", kind="train", recipe=recipe, seed=7, parent=parent, extra={"api_key": "x"}
    ) as writer:
        assert RunReader(writer.run_dir).status == "running"
        writer.finish("finished", result={"pass1": [0.5, 0.4, 0.6]})
    text = (tmp_path / "a/run.json").read_text()
    info = json.loads(text)
    assert "hf_abc" not in text and "word@" not in text and "sk-abc" not in text and '"x"' not in text
    assert info["recipe"]["hub"] | {"hf_token": ""} == {"hf_token": "", "eos_token": "<|im_end|>", "max_tokens": 10}
    assert info["recipe"]["rl"] == {"token_arrays": "kept"}
    assert info["schema_version"] == 1 and info["kind"] == "train" and info["seed"] == 7 and info["parent"] == parent
    assert info["versions"]["python"] and info["hardware"]["cores"] and info["status"] == "finished"
    assert info["result"] == {"pass1": [0.5, 0.4, 0.6]}


ENDS = {KeyboardInterrupt("why"): "stopped", CancelledError("why"): "stopped", RuntimeError("why"): "failed"}
ENDS |= {SystemExit(SIGTERM): "stopped", SystemExit(1): "failed"}  # Ray ends a driver with SystemExit


@pytest.mark.parametrize(("error", "status"), ENDS.items())
def test_error_in_the_block_sets_the_status(tmp_path, error, status):
    with pytest.raises(type(error)), RunWriter.open(tmp_path, "a", **TRAIN):
        raise error
    info = RunReader(tmp_path / "a").info
    assert (info["status"], info["error"]) == (status, str(error))


def test_killed_writer_leaves_an_interrupted_run(tmp_path):
    RunWriter.open(tmp_path, "a", **TRAIN).close()
    assert RunReader(tmp_path / "a").info["status"] == "running"
    assert RunReader(tmp_path / "a").status == "interrupted"


def test_vocabulary_is_written_once(tmp_path):
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        assert RunReader(writer.run_dir).vocabulary() is None
        writer.write_vocabulary(["a", "é", "\ud800"])
        writer.write_vocabulary(["a", "é", "?"])
    assert RunReader(tmp_path / "a").vocabulary() == ["a", "é", "?"]


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".hidden", "a b"])
def test_invalid_run_and_stage_names_are_rejected(tmp_path, name):
    with pytest.raises(UserError, match="folder's name"):
        RunWriter.open(tmp_path, name, **TRAIN)
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer, pytest.raises(ValueError, match="folder's name"):
        writer.write_step(name, 0, **rows(0), metrics={})


def test_opening_a_run_with_another_kind_is_rejected(run):
    with pytest.raises(RunStoreError, match="is of kind train, not evaluate"):
        RunWriter.open(run.parent, "a", kind="evaluate", recipe={}, seed=0)


def test_large_steps_keep_small_row_groups_for_transcripts(tmp_path):
    long = rows(0, groups=4, size=64, tokens=4000)
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        writer.write_step("rl", 0, **long, metrics={})
    (file,) = RunReader(tmp_path / "a").files("transcripts")
    footer = pa.parquet.read_metadata(file.path)
    assert footer.num_row_groups > 2
    assert footer.row_group(0).num_rows * 4000 <= 300_000
