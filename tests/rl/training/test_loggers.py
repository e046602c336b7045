"""Metrics and samples of rollouts reach the files of the trackers, without a network."""

import json
import time

import pytest
from helpers.analysis_runs import make_run

from rstar_lab.common.errors import UserError
from rstar_lab.rl.training import loggers
from rstar_lab.rl.training.loggers import ROLLOUTS, open_loggers, sample_rollouts

STEPS = [
    {"stage": "one", "step": 1, "reward": 0.25, "entropy": None},
    {"stage": "one", "step": 2, "reward": 0.5, "entropy": 1.5},
]


TABLE = [
    {"step": 1, "traj_id": "t1", "reward": 1.0, "outcomes": "ok", "transcript": "[assistant] <b>![x](http://evil)"}
]


def log_steps(names, run_dir, steps):
    with open_loggers(names, run_dir, {"name": "test", "rl": {"lr": 1e-6}}) as log:
        for metrics in steps:
            log(metrics["step"], metrics, TABLE)


def test_the_sample_has_both_outcomes_of_different_groups_and_their_texts(tmp_path):
    run_dir = make_run(tmp_path, "a", steps=2)
    rows = sample_rollouts(run_dir, 2)
    assert len(rows) == ROLLOUTS == len({row["traj_id"] for row in rows}) and {row["step"] for row in rows} == {2}
    assert len({row["problem_id"] for row in rows}) > 2 and sum(row["reward"] > 0 for row in rows) == ROLLOUTS // 2
    assert all("[assistant] " in row["transcript"] and row["question"] for row in rows)
    assert any("ok" in row["outcomes"] for row in rows) and sample_rollouts(run_dir, 9) == []


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
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json")]
    assert tables[0] == {"columns": [*TABLE[0]], "data": [[*TABLE[0].values()]]} and len(tables) >= 1


@pytest.mark.slow
def test_trackio_writes_the_steps_to_its_database_also_after_a_resume(tmp_path, monkeypatch, capsys):
    pytest.importorskip("trackio", reason="trackio is not among the test requirements")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    for metrics in STEPS:
        log_steps(["trackio"], tmp_path / "tiny-rl", [metrics])
    rows = SQLiteStorage.get_logs("rstar_lab", "tiny-rl")
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 0.25), (2, 0.5)]
    (shown,) = rows[0]["rollouts"]["_value"]
    assert shown["traj_id"] == "t1" and "<b>" not in shown["transcript"] and "&lt;b&gt;!&#91;x]" in shown["transcript"]
    assert rows[1]["entropy"] == 1.5 and capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.parametrize("uri", [None, "other.db"])
def test_mlflow_has_metrics_and_recipe_also_after_a_resume(tmp_path, monkeypatch, uri):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not among the test requirements")
    pytest.importorskip("sqlalchemy")
    database = f"sqlite:///{tmp_path / (uri or 'mlflow.db')}"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)  # where MLflow writes the tables of another database
    if uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    for metrics in STEPS:
        log_steps(["mlflow"], tmp_path / "tiny-rl", [metrics | {"metrics/a(b)": 1.0}])
    with pytest.raises(KeyError), open_loggers(["mlflow"], tmp_path / "other-rl", {"name": "x" * 900}):
        raise KeyError
    client = mlflow.MlflowClient(tracking_uri=database)
    experiment = client.get_experiment_by_name("rstar_lab").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert {name: run.info.status for name, run in runs.items()} == {"tiny-rl": "FINISHED", "other-rl": "FAILED"}
    run = runs["tiny-rl"]
    assert run.data.params == {"name": "test", "rl.lr": "1e-06"} and "metrics/a_b_" in run.data.metrics
    (artifact, _) = client.list_artifacts(run.info.run_id, "rollouts")
    assert artifact.path == "rollouts/step-000001.json"
    if not uri:
        (stored,) = (tmp_path / "mlflow-artifacts").rglob("step-000001.json")
        assert json.loads(stored.read_text()) == {"columns": [*TABLE[0]], "data": [[*TABLE[0].values()]]}
    found = client.get_metric_history(run.info.run_id, "reward")
    assert [(m.step, m.value) for m in found] == [(1, 0.25), (2, 0.5)]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(loggers, "import_module", missing)
    with pytest.raises(UserError, match="log_to: the package wandb is not installed"):
        log_steps(["wandb"], tmp_path, STEPS)
