"""Tests that a SIGKILL between any two file operations leaves complete steps, and that the run can be continued."""

import sys
from pathlib import Path

import pytest
from helpers.run_rows import rows

from rstar_lab.runs import RunReader, RunWriter
from rstar_lab.runs.compact import compact
from rstar_lab.runs.reader import run_folders

TRAIN = {"kind": "train", "recipe": {}, "seed": 0}
_TOUCHING = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"}


def write_run_with_resume(runs_dir: Path) -> None:
    """Write a run in two attempts with checkpoints, a cut and two compactions."""
    with RunWriter.open(runs_dir, "a", **TRAIN) as writer:
        writer.write_vocabulary(["a"])
        for step in (0, 1):
            writer.write_step("sft", step, **rows(step), metrics={})
        with writer.checkpoint(1) as folder:
            (folder / "weights").write_bytes(b"w")
        writer.write_step("rl", 2, **rows(2), metrics={})
    compact(runs_dir / "a")
    with RunWriter.open(runs_dir, "a", **TRAIN) as writer:
        writer.cut(0)
        for step in (1, 2, 3):
            writer.write_step("sft", step, **rows(step), metrics={})
            with writer.checkpoint(step) as folder:
                (folder / "weights").write_bytes(b"w")
            writer.keep_checkpoints(1)
        writer.finish("finished")
    compact(runs_dir / "a")


def states_before_file_operations(runs_dir: Path) -> list[dict[Path, bytes | None]]:
    """Return the distinct states of the folder right before each file operation of the writer."""
    states: list[dict[Path, bytes | None]] = []
    recording = False

    def record_state(event: str, arguments: tuple) -> None:
        nonlocal recording
        if recording or event not in _TOUCHING or str(runs_dir) not in str(arguments[0]):
            return
        recording = True
        paths = sorted(runs_dir.rglob("*"))
        state = {path.relative_to(runs_dir): None if path.is_dir() else path.read_bytes() for path in paths}
        if state not in states[-1:]:
            states.append(state)
        recording = False

    sys.addaudithook(record_state)  # cannot be removed; it ignores other folders
    write_run_with_resume(runs_dir)
    return states


def write_state(state: dict[Path, bytes | None], folder: Path) -> None:
    for path, data in state.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).mkdir() if data is None else (folder / path).write_bytes(data)


def check(runs_dir: Path) -> None:
    for reader in map(RunReader, run_folders(runs_dir)):
        steps = reader.steps()
        assert list(steps) == list(range(len(steps)))
        for level, rows_per_step in (("trajectories", 8), ("calls", 12), ("transcripts", 8)):
            table = reader.read(level).to_pandas()
            assert table.groupby("step").size().to_dict() == dict.fromkeys(steps, rows_per_step)
            assert (table.stage == table.step.map(steps)).all()
            assert not table.duplicated(["traj_id", "index"] if level == "calls" else "traj_id").any()
        attempts = reader.read("trajectories").to_pandas().groupby("step").attempt.nunique()
        assert (attempts == 1).all()
        for folder in reader.checkpoints().values():
            assert (folder / "weights").read_bytes() == b"w"


@pytest.mark.soak
def test_kill_before_any_file_operation_leaves_complete_steps(tmp_path):
    states = states_before_file_operations(tmp_path / "life")
    assert len(states) > 60
    for number, state in enumerate(states):
        runs_dir = tmp_path / str(number)
        runs_dir.mkdir()
        write_state(state, runs_dir)
        check(runs_dir)
        with RunWriter.open(runs_dir, "a", **TRAIN) as writer:
            step = 0 if writer.last_step is None else writer.last_step + 1
            writer.write_step("rl", step, **rows(step), metrics={})
        check(runs_dir)
        assert [path.name for path in (runs_dir / "a").rglob(".*")] == [".lock"]


def test_incomplete_last_line_is_not_a_step(tmp_path):
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        for step in (0, 1):
            writer.write_step("rl", step, **rows(step), metrics={"x": 1.5})
    metrics = tmp_path / "a" / "metrics.jsonl"
    content = metrics.read_bytes()
    first = content.index(b"\n") + 1
    for size in range(first, len(content)):
        metrics.write_bytes(content[:size])
        assert RunReader(tmp_path / "a").steps() == {0: "rl"}
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        assert writer.last_step == 0
        writer.write_step("rl", 1, **rows(1), metrics={"x": 1.5})
    assert metrics.read_bytes() == content
