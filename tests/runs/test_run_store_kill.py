"""SIGKILL between any two file operations leaves a store that reads as whole steps, and a run that goes on."""

import itertools
import os
import signal
import sys
from pathlib import Path

import pytest
from run_rows import rows

from rstar_lab.runs import RunReader, RunWriter, list_runs
from rstar_lab.runs.compact import compact

TRAIN = {"kind": "train", "recipe": {}, "seed": 0}
_TOUCHING = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"}


def life_of_a_run(runs_dir: Path) -> None:
    """Two attempts with checkpoints, a cut, and two compactions."""
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


def killed_at(operation: int, runs_dir: Path) -> bool:
    """Live in a child that is killed right before its n-th file operation; False when it got to the end."""
    pid = os.fork()
    if pid == 0:
        count = itertools.count()

        def kill(event: str, arguments: tuple) -> None:
            if event in _TOUCHING and str(runs_dir) in str(arguments[0]) and next(count) == operation:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        try:
            life_of_a_run(runs_dir)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def check(runs_dir: Path) -> None:
    for reader in list_runs(runs_dir):
        steps = reader.steps()
        assert list(steps) == list(range(len(steps)))
        for level, a_step in (("trajectories", 8), ("calls", 12), ("transcripts", 8)):
            table = reader.read(level).to_pandas()
            assert table.groupby("step").size().to_dict() == dict.fromkeys(steps, a_step)
            assert (table.stage == table.step.map(steps)).all()
            assert not table.duplicated(["traj_id", "index"] if level == "calls" else "traj_id").any()
        attempts = reader.read("trajectories").to_pandas().groupby("step").attempt.nunique()
        assert (attempts == 1).all()
        for folder in reader.checkpoints().values():
            assert (folder / "weights").read_bytes() == b"w"


@pytest.mark.slow
def test_a_kill_before_any_file_operation(tmp_path):
    RunWriter.open(tmp_path / "warm", "a", **TRAIN)  # versions and commit are looked up once a process
    for operation in itertools.count():
        runs_dir = tmp_path / str(operation)
        runs_dir.mkdir()
        killed = killed_at(operation, runs_dir)
        check(runs_dir)
        with RunWriter.open(runs_dir, "a", **TRAIN) as writer:
            check(runs_dir)
            following = -1 if writer.last_step is None else writer.last_step
            writer.write_step("sft" if following != 1 else "rl", following + 1, **rows(following + 1), metrics={})
        check(runs_dir)
        left = [path for path in (runs_dir / "a").rglob(".*") if path.name != ".lock"]
        assert left == []
        if not killed:
            break
    assert operation > 100  # the hook saw the writer's work


def test_any_beginning_of_the_last_line_is_no_step(tmp_path):
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        for step in (0, 1):
            writer.write_step("rl", step, **rows(step), metrics={"x": 1.5})
    metrics = tmp_path / "a" / "metrics.jsonl"
    whole = metrics.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        metrics.write_bytes(whole[:size])
        assert RunReader(tmp_path / "a").steps() == {0: "rl"}
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        assert writer.last_step == 0
        writer.write_step("rl", 1, **rows(1), metrics={"x": 1.5})
    assert metrics.read_bytes() == whole
