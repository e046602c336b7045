"""Metrics of the steps reach the files of the trackers, without a network."""

import time

import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.rl.training import loggers
from rstar_lab.rl.training.loggers import open_loggers

STEPS = [
    {"stage": "one", "step": 1, "reward": 0.25, "entropy": None},
    {"stage": "one", "step": 2, "reward": 0.5, "entropy": 1.5},
]


def log_steps(names, run_dir, steps):
    with open_loggers(names, run_dir, {"name": "test", "rl": {"lr": 1e-6}}) as log:
        for metrics in steps:
            log(metrics["step"], metrics)


def test_tensorboard_has_every_number_also_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for metrics in STEPS:  # the second call is a resumed run
        log_steps(["tensorboard"], tmp_path, [metrics])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("entropy")] == [(2, 1.5)]


def records(data: bytes):
    """Yield the records of a .wandb file: a header of 7 bytes, then a log in LevelDB's format with blocks of 32 KiB."""
    position, parts = 7, []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        if position + 7 + length > len(data):  # not yet written
            return
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield b"".join(parts)
            parts = []


def history(data: bytes) -> list[tuple[int, float]]:
    """Return (step, reward) of the history records of a .wandb file."""
    from wandb.proto.wandb_internal_pb2 import Record

    seen = []
    for part in records(data):
        record = Record()
        record.ParseFromString(part)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            seen.append((int(items["_step"]), float(items["reward"])))
    return seen


@pytest.mark.slow
def test_wandb_offline_writes_the_steps_into_the_run_folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_steps(["wandb"], tmp_path, STEPS)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    # W&B's own process completes the file, which can be after `finish` has returned.
    deadline = time.monotonic() + 30
    while len(seen := history(file.read_bytes())) < len(STEPS) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert seen == [(1, 0.25), (2, 0.5)]


@pytest.mark.slow
def test_trackio_writes_the_steps_to_its_database_also_after_a_resume(tmp_path, monkeypatch, capsys):
    pytest.importorskip("trackio", reason="trackio is not among the test requirements")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    for metrics in STEPS:
        log_steps(["trackio"], tmp_path / "tiny-rl", [metrics])
    rows = SQLiteStorage.get_logs("rstar_lab", "tiny-rl")
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 0.25), (2, 0.5)]
    assert rows[1]["entropy"] == 1.5 and capsys.readouterr().out == ""


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(loggers, "import_module", missing)
    with pytest.raises(UserError, match="log_to: the package wandb is not installed"):
        log_steps(["wandb"], tmp_path, STEPS)
