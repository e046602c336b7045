"""A run continues from its newest whole state with the numbers of an undisturbed run, or refuses with one line."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.run_rows import rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunReader, RunStoreError, RunWriter
from rstar_lab.runs.compact import compact
from rstar_lab.runs.whole import MANIFEST

TRAIN = {"kind": "train", "recipe": {}, "seed": 0}
STEPS, EVERY = 5, 2


def train(runs_dir: Path) -> None:
    """Train or continue a run as the trainers do; the state of a checkpoint is the sum of its steps."""
    with RunWriter.open(runs_dir, "a", **TRAIN) as writer:
        checkpoint, state = writer.latest_checkpoint(), 0
        if checkpoint:
            state = int((checkpoint[1] / "weights").read_text())
            writer.check_steps(checkpoint[0])
        writer.cut(checkpoint[0] if checkpoint else 0)
        for step in range((checkpoint[0] if checkpoint else 0) + 1, STEPS + 1):
            state += step
            writer.write_step("rl", step, **rows(step), metrics={"state": state})
            if step % EVERY == 0 or step == STEPS:
                with writer.checkpoint(step) as folder:
                    (folder / "weights").write_text(f"{state:06d}")
                writer.keep_checkpoints(2)
        writer.finish("finished")


def numbers(run: Path) -> tuple:
    reader = RunReader(run)
    assert reader.damages() == []
    state = int((reader.checkpoints()[STEPS] / "weights").read_text())
    tables = [reader.read("transcripts"), reader.rollup(), *map(reader.read, ("trajectories", "calls"))]
    rows = [table.drop_columns(["attempt"]) if "attempt" in table.column_names else table for table in tables]
    return reader.metrics(), state, rows


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs_dir = tmp_path_factory.mktemp("undisturbed")
    train(runs_dir)
    return runs_dir / "a"


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_run_ends_with_the_same_numbers_or_refuses(undisturbed: Path, tmp_path: Path, data: st.DataObject):
    expected = numbers(undisturbed)
    shutil.rmtree(tmp_path / "a", ignore_errors=True)
    shutil.copytree(undisturbed, tmp_path / "a")
    if data.draw(st.booleans(), "merged"):
        compact(tmp_path / "a")
    files = sorted(path for path in (tmp_path / "a").rglob("*") if path.is_file() and path.name != ".lock")
    path = data.draw(st.sampled_from(files), "file")
    before = {file: file.read_bytes() for file in files}
    match data.draw(st.sampled_from(["truncate", "remove", "swap"]), "damage"):
        case "truncate":
            path.write_bytes(before[path][: data.draw(st.integers(0, len(before[path])), "bytes")])
        case "remove":
            path.unlink()
        case "swap":
            other = data.draw(st.sampled_from(files), "other")
            path.write_bytes(before[other])
            other.write_bytes(before[path])
    damaged = {file: file.read_bytes() for file in files if file.exists()}
    try:
        train(tmp_path / "a" / "..")
    except UserError as error:
        assert "\n" not in str(error) and str(tmp_path) in str(error)
        kept = {file: file.read_bytes() for file in damaged if file.exists()}
        assert kept.keys() == damaged.keys(), "a run that refuses lost files"
    else:
        assert numbers(tmp_path / "a") == expected


def test_lost_lines_of_metrics_are_trained_again(undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    shutil.copytree(undisturbed, tmp_path / "a")
    metrics = tmp_path / "a" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:4]))
    train(tmp_path)
    assert "before checkpoint step=000005; run a continues from checkpoint step=000004" in caplog.text
    assert numbers(tmp_path / "a") == numbers(undisturbed)


def test_a_run_without_an_older_checkpoint_refuses_and_keeps_its_tables(undisturbed: Path, tmp_path: Path):
    shutil.copytree(undisturbed, tmp_path / "a")
    metrics = tmp_path / "a" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    tables = sorted((tmp_path / "a").rglob("*.parquet"))
    with pytest.raises(RunStoreError, match=r"metrics\.jsonl ends at step 3.*remove .*checkpoints to train again"):
        train(tmp_path)
    assert sorted((tmp_path / "a").rglob("*.parquet")) == tables
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    train(tmp_path)
    assert numbers(tmp_path / "a")[0] == numbers(undisturbed)[0]


@pytest.mark.parametrize("damage", ["shorter", "empty", "missing", "of another step"])
def test_a_damaged_checkpoint_gives_way_to_an_older_one(undisturbed: Path, tmp_path: Path, damage: str, caplog):
    shutil.copytree(undisturbed, tmp_path / "a")
    folders = RunReader(tmp_path / "a").checkpoints()
    weights = folders[5] / "weights"
    match damage:
        case "shorter":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "empty":
            weights.write_bytes(b"")
        case "missing":
            weights.unlink()
        case "of another step":  # of the same size
            weights.write_bytes((folders[4] / "weights").read_bytes())
    train(tmp_path)
    assert numbers(tmp_path / "a") == numbers(undisturbed)
    assert "continues from checkpoint step=000004" in caplog.text


def test_a_checkpoint_of_an_earlier_version_is_accepted(undisturbed: Path, tmp_path: Path):
    shutil.copytree(undisturbed, tmp_path / "a")
    (tmp_path / "a/checkpoints/step=000005" / MANIFEST).unlink()
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        checkpoint = writer.latest_checkpoint()
        assert checkpoint is not None and checkpoint[0] == 5


@pytest.mark.parametrize("way", ["moved", "deleted", "started again"])
def test_nothing_is_written_to_a_folder_that_is_not_the_locked_one(tmp_path: Path, way: str):
    with pytest.raises(RunStoreError, match="was moved or deleted"), RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        writer.write_step("rl", 1, **rows(1), metrics={})
        if way == "moved":
            (tmp_path / "a").rename(tmp_path / "b")
        else:
            shutil.rmtree(tmp_path / "a")
        if way == "started again":
            RunWriter.open(tmp_path, "a", **TRAIN).close()
        before = sorted(tmp_path.rglob("*"))
        for write in (
            lambda: writer.write_step("rl", 2, **rows(2), metrics={}),
            lambda: writer.checkpoint(1).__enter__(),
            lambda: writer.cut(0),
            lambda: writer.write_vocabulary(["a"]),
            lambda: writer.finish("finished"),
        ):
            with pytest.raises(RunStoreError, match="was moved or deleted"):
                write()
        assert sorted(tmp_path.rglob("*")) == before
        writer.write_step("rl", 2, **rows(2), metrics={})


def test_a_damaged_table_is_named_and_the_rest_is_read(undisturbed: Path, tmp_path: Path):
    shutil.copytree(undisturbed, tmp_path / "a")
    path = tmp_path / "a/trajectories/stage=rl/step=000003.parquet"
    path.write_bytes(path.read_bytes()[:-10])
    (damage,) = RunReader(tmp_path / "a").damages()
    assert damage.steps == (3,) and str(path) in str(damage.error)


def test_a_swapped_table_is_damaged(undisturbed: Path, tmp_path: Path):
    shutil.copytree(undisturbed, tmp_path / "a")
    first, second = (tmp_path / f"a/calls/stage=rl/step=00000{step}.parquet" for step in (1, 2))
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    assert [damage.steps for damage in RunReader(tmp_path / "a").damages()] == [(1,), (2,)]


def test_an_error_of_a_full_disk_names_the_bytes(tmp_path: Path):
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        writer.write_step("rl", 1, **rows(1), metrics={})
        for error, needed, shown in (
            (OSError(28, "No space left on device"), 7, "7 bytes"),
            (RuntimeError("unexpected pos 12 vs 10"), None, "more than 3 bytes"),
        ):
            text = rf"cannot write .*step=000001: .*left on.*\({shown} are needed, [\d,]+ bytes are free"
            with pytest.raises(RunStoreError, match=text), writer.checkpoint(1, needed) as folder:
                (folder / "half").write_text("xyz")
                raise error
        assert [*(tmp_path / "a" / "checkpoints").iterdir()] == []
        assert json.loads((tmp_path / "a" / "run.json").read_text())["status"] == "running"


@pytest.mark.parametrize("error", [RuntimeError("Parent directory does not exist"), FileNotFoundError(2, "x", "y")])
def test_a_run_folder_that_is_deleted_during_a_checkpoint_is_named(error, tmp_path):
    with pytest.raises(RunStoreError, match="a was moved or deleted while this process wrote it"):
        with RunWriter.open(tmp_path, "a", **TRAIN) as writer, writer.checkpoint(1):
            shutil.rmtree(tmp_path / "a")
            raise error  # of a library that writes into the folder
