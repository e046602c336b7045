"""Tests of the errors for damaged, foreign and newer files, and of a full disk."""

import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.run_rows import rows

from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunReader, RunStoreError, RunWriter
from rstar_lab.runs.compact import compact
from rstar_lab.runs.reader import STEPS_KEY
from rstar_lab.runs.schema import LEVELS, VERSION_KEY

TRAIN = {"kind": "train", "recipe": {}, "seed": 0}
FILE = "trajectories/stage=rl/step=000001.parquet"


@pytest.fixture
def run(tmp_path):
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        for step in range(3):
            writer.write_step("rl", step, **rows(step), metrics={})
    return tmp_path / "a"


def assert_error_contains(run, *parts):
    with pytest.raises(UserError) as caught:
        RunReader(run).read("trajectories")
    for part in parts:
        assert part in str(caught.value)


def rewrite(path, rows=None, **marks):
    """Write the table of a file again with fewer rows, or with other metadata."""
    file = pq.ParquetFile(path)
    metadata = file.schema_arrow.metadata | {key.encode(): value.encode() for key, value in marks.items()}
    pq.write_table(file.read().slice(0, rows).replace_schema_metadata(metadata), path)


DAMAGES = {
    "empty": (lambda path: path.write_bytes(b""), (FILE, "truncated")),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), (FILE, "truncated")),
    "missing": (lambda path: path.unlink(), ("the file of step 1 is missing",)),
    "foreign": (lambda path: pq.write_table(pa.table({"x": [1]}), path), (FILE, "not a trajectories file")),
    "of another level": (
        lambda path: shutil.copy(path.parents[2] / "calls/stage=rl" / path.name, path), (FILE, "not a trajectories file")
    ),
    "fewer rows": (lambda path: rewrite(path, 5), (FILE, "it has 5 rows where 8 were written")),
    "newer": (lambda path: rewrite(path, **{VERSION_KEY: "2"}), (FILE, "schema version 2", "upgrade rstar_lab")),
    "of no version": (lambda path: rewrite(path, **{VERSION_KEY: "abc"}), (FILE, "invalid schema version", "abc")),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_an_error_names_a_damaged_table(run, name):
    damage, parts = DAMAGES[name]
    damage(run / FILE)
    assert_error_contains(run, *parts)


@pytest.mark.parametrize(
    ("level", "column"), [("trajectories", "reward"), ("calls", "outcome"), ("transcripts", "entropy")]
)
def test_an_error_names_a_lost_column(run, level, column):
    compact(run)
    path = run / level / "stage=rl/steps=000000-000002.parquet"
    pq.write_table(pq.ParquetFile(path).read().drop_columns([column]), path)
    message = rf"{level}/stage=rl/{path.name} is damaged: it lacks the column {column!r}"
    with pytest.raises(RunStoreError, match=message):
        RunReader(run).files(level)
    with pytest.raises(RunStoreError, match=message):
        compact(run)


@pytest.mark.parametrize("steps", ["[0, 1", "7", '["a"]'])
def test_an_error_names_a_merged_file_with_a_damaged_list_of_steps(run, steps):
    compact(run)
    path = run / "trajectories/stage=rl/steps=000000-000002.parquet"
    rewrite(path, **{STEPS_KEY: steps})
    assert_error_contains(run, path.name, "the list of its steps")


def test_an_error_names_a_damaged_run_json(run):
    text = (run / "run.json").read_text()
    for damage, message in [
        (text[:50], "not JSON"),
        ("[]", "valid dictionary"),
        ("{}", "Field required"),
        (json.dumps(json.loads(text) | {"kind": 5}), "kind: Input should be a valid string"),
        (json.dumps(json.loads(text) | {"schema_version": 9}), "upgrade rstar_lab"),
    ]:
        (run / "run.json").write_text(damage)
        assert_error_contains(run, "run.json", message)
    (run / "run.json").unlink()
    assert_error_contains(run, "is not a run")


def test_an_error_names_a_damaged_metrics_line(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0] + lines[1][:7] + "\n" + lines[2])
    assert_error_contains(run, "metrics.jsonl, line 2: not JSON")


def test_compact_rebuilds_a_missing_rollup(run):
    before = RunReader(run).rollup().drop_columns(["attempt"])
    pq.write_table(pq.read_table(run / "rollup.parquet").drop_columns(["step"]), run / "rollup.parquet")
    assert_error_contains(run, "rollup.parquet", "lacks the column 'step'")
    (run / "rollup.parquet").write_bytes(b"PAR1")
    assert_error_contains(run, "rollup.parquet")
    (run / "rollup.parquet").unlink()
    assert_error_contains(run, "rollup.parquet", "runs compact a")
    compact(run)
    assert RunReader(run).rollup().drop_columns(["attempt"]) == before
    assert RunReader(run).read("trajectories").num_rows == 24


def test_foreign_files_in_the_run_folder_are_ignored(run):
    shutil.copy(run / FILE, run / "trajectories/stage=rl/step=000009.parquet")
    shutil.copy(run / FILE, run / "trajectories/stage=rl/.step=000002.parquet.tmp")
    (run / "trajectories/stage=other").mkdir()
    shutil.copy(run / FILE, run / "trajectories/stage=other/step=000001.parquet")
    assert RunReader(run).read("trajectories").num_rows == 24


def test_compaction_keeps_all_rows_and_allows_later_steps_and_cuts(run):
    before = {level: RunReader(run).read(level) for level in ("trajectories", "calls", "transcripts")}
    done = compact(run)
    assert (done.before, done.after) == (9, 3)
    assert sorted(path.name for path in run.glob("*/stage=rl/*")) == ["steps=000000-000002.parquet"] * 3
    for level, table in before.items():
        assert RunReader(run).read(level) == table
    with RunWriter.open(run.parent, "a", **TRAIN) as writer:
        writer.write_step("rl", 3, **rows(3), metrics={})
        assert RunReader(run).read("calls").num_rows == 48
        writer.cut(1)
        assert RunReader(run).read("calls").num_rows == 24
        writer.write_step("rl", 2, **rows(2), metrics={})
    assert compact(run).after == 3
    for level, table in before.items():
        assert RunReader(run).read(level).drop_columns(["run_id"]).num_rows == table.num_rows


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kept_lines", [0, 2])
def test_compact_keeps_the_files_of_uncommitted_steps(run, merged, kept_lines):
    if merged:
        compact(run)
    before = {level: RunReader(run).read(level) for level in LEVELS}
    metrics = run / "metrics.jsonl"
    complete = metrics.read_bytes()
    lines = complete.splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:kept_lines]) + lines[kept_lines][:-5])
    for _ in range(2):
        compact(run)
        assert RunReader(run).read("trajectories").num_rows == 8 * kept_lines
    metrics.write_bytes(complete)
    assert {level: RunReader(run).read(level) for level in LEVELS} == before
    compact(run)
    assert {level: RunReader(run).read(level) for level in LEVELS} == before
    assert len(list(run.glob("*/stage=rl/*"))) == 3


def test_compact_removes_only_files_that_a_merged_file_replaces(run):
    copy, foreign = run.parent / "copy", run / "calls/stage=rl/notes.parquet"
    shutil.copytree(run, copy)
    compact(run)
    shutil.copytree(copy / "calls", run / "calls", dirs_exist_ok=True)  # as after a compaction that was killed
    foreign.write_text("notes of the user")
    compact(run)
    assert sorted(path.name for path in run.glob("calls/stage=rl/*")) == [foreign.name, "steps=000000-000002.parquet"]


@pytest.mark.slow
def test_full_disk_is_a_clear_error_and_keeps_finished_steps(tmp_path):
    script = """
import resource, signal, sys
from helpers.run_rows import rows
from rstar_lab.runs import RunStoreError, RunWriter
with RunWriter.open(sys.argv[1], "a", kind="train", recipe={}, seed=0) as writer:
    writer.write_step("rl", 0, **rows(0), metrics={})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 10, 3000, 100_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
        try:
            writer.write_step("rl", 1, **rows(1), metrics={"x": "y" * 200_000})
        except RunStoreError as error:
            print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    writer.write_step("rl", 1, **rows(1), metrics={})
"""
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True, text=True, env={"PYTHONPATH": f"{tests.parent}:{tests}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("cannot write ") and "File too large" in line for line in lines)
    assert "metrics.jsonl" in lines[-1]
    assert all(re.search(r" \((more than )?[\d,]+ bytes are needed, [\d,]+ bytes are free\); ", line) for line in lines)
    reader = RunReader(tmp_path / "a")
    assert reader.steps() == {0: "rl", 1: "rl"}
    assert reader.read("trajectories").num_rows == 16
    assert [path.name for path in (tmp_path / "a").rglob(".*")] == [".lock"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
