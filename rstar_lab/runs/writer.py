"""Write a run. A step is written completely or not at all, even if the process is killed.

The files of a step are written first and its line in metrics.jsonl last. The step is committed when its line is
written. `cut` removes the lines first and the files afterwards. Opening a run again removes files without a line.
"""

import itertools
import json
import logging
import os
import shutil
from asyncio import CancelledError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from signal import SIGTERM
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from rstar_lab.runs import provenance
from rstar_lab.runs.errors import RunStoreError
from rstar_lab.runs.files import (
    atomic_write,
    json_safe,
    name_disk_errors,
    open_regular,
    remove_folder,
    sync_path,
    write_json,
)
from rstar_lab.runs.lock import RunLock
from rstar_lab.runs.reader import (
    STEPS_KEY,
    RunReader,
    check_file,
    checkpoints,
    filter_steps,
    read_metrics_lines,
    steps_of_file,
    with_all_columns,
)
from rstar_lab.runs.schema import (
    LEVEL_KEY,
    LEVELS,
    SCHEMA_VERSION,
    VERSION_KEY,
    is_valid_name,
    schema_with_metadata,
    step_file,
)
from rstar_lab.runs.tables import ROLLUP, rollup_row, table_of
from rstar_lab.runs.whole import examine, write_manifest
from rstar_lab.untrusted.parquet import read_parquet

_LOG = logging.getLogger(__name__)

# Columns whose values are all different, where dictionary encoding only adds size.
_DIFFERENT = {"traj_id", "messages"}
_TOKENS_PER_ROW_GROUP = 250_000  # reading one transcript decodes its row group, which takes a few milliseconds
# Small enough that a query for some steps reads only a part of a file, large enough for fast full scans.
_ROWS_PER_GROUP = {"trajectories": 32_768, "calls": 131_072, "transcripts": 1000}


class RunWriter:
    """Writer of a run, a context manager. A run has at most one writer at a time.

    Leaving the block releases the run. If `finish` was not called, an error sets the status failed, Ctrl-C sets
    stopped.
    """

    def __init__(self, run_dir: Path, lock: RunLock, info: dict[str, Any]):
        """Used by `open` only."""
        self.run_dir, self.attempt = run_dir, info["attempts"]
        self._lock, self._info = lock, info
        self._metrics = run_dir / "metrics.jsonl"
        self.last_step: int | None = None  # last committed step
        self._rollup = ROLLUP.empty_table()
        self._repair()

    @classmethod
    def open(
        cls,
        runs_dir: str | Path,
        run_id: str,
        *,
        kind: str,
        recipe: Mapping[str, Any],
        seed: int,
        parent: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Self:
        """Create the run, or continue it if it exists (attempt + 1) and remove its uncommitted files.

        kind: train, evaluate, chat, import or fork. parent: {"run", "step"} from which this run starts.
        extra: stored in run.json under "extra". Secrets in recipe and extra are redacted.
        Raises RunLocked if another process is writing the run, RunStoreError if it has another kind or cannot be read or
        written.
        """
        if not is_valid_name(run_id):
            raise RunStoreError(
                f"run id {run_id!r} is not a valid folder's name: use letters, digits, '.', '_' and '-'"
            )
        run_dir = Path(runs_dir) / run_id
        with name_disk_errors(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = RunLock(run_dir)
        try:
            now = _now()
            old = RunReader(run_dir).info if (run_dir / "run.json").exists() else None
            if old and old["kind"] != kind:
                raise RunStoreError(f"run {run_dir} is of kind {old['kind']}, not {kind}: choose another run id")
            if old:
                _check_that_it_can_continue(run_dir, kind)
            info = {
                "schema_version": SCHEMA_VERSION,
                "run_id": run_id,
                "kind": kind,
                "status": "running",
                "created": old.get("created") if old else now,
                "started": now,
                "ended": None,
                "attempts": (old.get("attempts") or 0) + 1 if old else 1,
                "seed": seed,
                "parent": parent,
                "recipe": provenance.redact(dict(recipe)),
                "extra": provenance.redact(extra or {}),
                "versions": provenance.versions(),
                "commit": provenance.commit(),
                "hardware": provenance.hardware(),
                "error": None,
                "result": old.get("result") if old else None,
            }
            write_json(run_dir / "run.json", info)
            return cls(run_dir, lock, info)
        except BaseException:
            lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is not None and self._info["status"] == "running":
                # asyncio turns Ctrl-C into CancelledError inside a coroutine. Ray ends its drivers with SystemExit on SIGTERM.
                terminated = isinstance(error, SystemExit) and error.code == SIGTERM
                stopped = terminated or issubclass(kind, KeyboardInterrupt | CancelledError)
                self.finish("stopped" if stopped else "failed", error=str(error) or kind.__name__)
        except RunStoreError:
            if kind is None:  # a full disk must not hide the error that ended the block
                raise
        finally:
            self.close()

    def close(self) -> None:
        """Release the run. If `finish` was not called, readers see the status interrupted."""
        self._lock.release()

    def write_step(
        self,
        stage: str,
        step: int,
        *,
        trajectories: Sequence[dict[str, Any]],
        calls: Sequence[dict[str, Any]],
        transcripts: Sequence[dict[str, Any]] | int,
        metrics: dict[str, Any],
    ) -> None:
        """Write a step completely or not at all.

        Rows are dicts of the schema's columns; run, attempt, stage and step are filled in. metrics: JSON values.
        transcripts: if `write_parts` has written their file already, the number of its rows.
        Raises ValueError for a row that does not fit the schema or a step that is not after the last one, RunStoreError
        if the disk is full.
        """
        if not is_valid_name(stage):
            raise ValueError(f"stage {stage!r} is not a valid folder's name: use letters, digits, '.', '_' and '-'")
        self._lock.check()
        last = self.last_step
        if step < 0 or (last is not None and step <= last):
            raise ValueError(
                f"step {step} does not come after step {last}, the last one of run {self.run_dir}; cut the run first"
            )
        where = {"run_id": self._info["run_id"], "stage": stage, "step": step, "attempt": self.attempt}
        rows = {"trajectories": trajectories, "calls": calls, "transcripts": transcripts}
        tables = {
            level: table_of(level, part, {name: where[name] for name in where.keys() & LEVELS[level].names})
            for level, part in rows.items()
            if not isinstance(part, int)
        }
        for level, table in tables.items():
            if table.num_rows:
                write_parts(step_file(self.run_dir, level, stage, step), level, [table])
        counts = {level: part if isinstance(part, int) else len(part) for level, part in rows.items()}
        row = rollup_row(tables["trajectories"], counts, where)
        rollup = pa.concat_tables([self._rollup, pa.Table.from_pylist([row], ROLLUP)])
        write_rollup(self.run_dir, rollup)
        self._append({"stage": stage, "step": step} | metrics)
        self._rollup, self.last_step = rollup, step

    def check_steps(self, step: int) -> None:
        """Raise RunStoreError unless all steps from 1 to `step` are committed: a run that continues after them would have a gap."""
        steps = [number for number in RunReader(self.run_dir).steps() if number <= step]
        if steps != [*range(1, step + 1)]:
            raise RunStoreError(f"{self._metrics} does not have all steps from 1 to {step}; restore it from a copy")

    def cut(self, step: int) -> None:
        """Remove the steps and checkpoints after `step`. Called by a run that resumes from the checkpoint of `step`."""
        self._lock.check()
        lines, _ = read_metrics_lines(self._metrics)
        kept = [line for line in lines if line["step"] <= step]
        for number, folder in checkpoints(self.run_dir).items():  # first: no checkpoint is newer than the last line
            if number > step:
                remove_folder(folder)
        if len(kept) < len(lines):
            with atomic_write(self._metrics) as file:
                file.write(b"".join(_line(line) for line in kept))
        self._repair()

    def write_vocabulary(self, tokens: Sequence[str]) -> None:
        """Store the text of each token id, so that readers need no tokenizer."""
        self._lock.check()
        if RunReader(self.run_dir).vocabulary() != list(tokens):
            write_json(self.run_dir / "tokens.json", [token.encode("utf-8", "replace").decode() for token in tokens])

    @contextmanager
    def checkpoint(self, step: int, needed: int | None = None) -> Iterator[Path]:
        """Yield a folder that becomes checkpoints/step=... when the block ends without error.

        Write the step before its checkpoint: a run that resumes from the checkpoint does not repeat the step. needed: bytes of the
        files, for the error of a full disk.
        """
        self._lock.check()
        parent = self.run_dir / "checkpoints"
        hidden, final = parent / f".step={step:06d}.tmp", parent / f"step={step:06d}"
        try:
            with name_disk_errors(final, needed, hidden):
                shutil.rmtree(hidden, ignore_errors=True)
                hidden.mkdir(parents=True)
                yield hidden
                write_manifest(hidden, step)
                for path in [*hidden.rglob("*"), hidden]:
                    sync_path(path)
                self._lock.check()
                remove_folder(final)
                hidden.replace(final)
                sync_path(parent)
        except BaseException as error:
            shutil.rmtree(hidden, ignore_errors=True)
            if isinstance(error, Exception):
                self._lock.check()  # a library describes a missing folder in its own words
            raise

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Return (step, folder) of the newest checkpoint that is whole and that no damaged or lost table precedes, or None."""
        return max(examine(self.run_dir).usable.items(), default=None)

    def keep_checkpoints(self, n: int) -> None:
        """Delete all checkpoints except the newest n."""
        for _, folder in sorted(checkpoints(self.run_dir).items(), reverse=True)[n:]:
            remove_folder(folder)

    def finish(self, status: str, error: str | None = None, result: dict[str, Any] | None = None) -> None:
        """Set the final status: finished, failed or stopped. result: stored in run.json."""
        if status not in ("finished", "failed", "stopped"):
            raise ValueError(f"status must be finished, failed or stopped, got {status!r}")
        self._lock.check()
        self._info |= {"status": status, "ended": _now(), "error": provenance.redact(error)}
        if result is not None:
            self._info["result"] = result
        write_json(self.run_dir / "run.json", self._info)

    def _append(self, line: dict[str, Any]) -> None:
        data = _line(line)
        with name_disk_errors(self._metrics, len(data)):
            with os.fdopen(open_regular(self._metrics, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
                before = file.tell()
                try:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                except BaseException:
                    os.ftruncate(file.fileno(), before)  # otherwise the next line would complete a half-written one
                    raise

    def _repair(self) -> None:
        """Remove an incomplete last line, files of uncommitted steps and temporary files."""
        lines, size = read_metrics_lines(self._metrics)
        if self._metrics.exists() and self._metrics.stat().st_size > size:
            os.truncate(self._metrics, size)
        steps = {line["step"]: line["stage"] for line in lines}
        hidden = [
            *self.run_dir.glob(".*.tmp"),
            *self.run_dir.glob("*/stage=*/.*"),
            *self.run_dir.glob("checkpoints/.*"),
        ]
        for path in hidden:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for level in LEVELS:
            for path in sorted((self.run_dir / level).glob("stage=*/*.parquet")):
                if (held := steps_of_file(path, level)) is None:
                    continue
                kept = tuple(step for step in held if steps.get(step) == path.parent.name.removeprefix("stage="))
                if not kept:
                    path.unlink()
                elif kept != held:
                    rewrite_with_steps(path, level, kept)
        self.last_step = max(steps, default=None)
        self._rollup = RunReader(self.run_dir).rollup()


def _check_that_it_can_continue(run_dir: Path, kind: str) -> None:
    """Raise RunStoreError if a run has lost what it needs to continue. Log what is lost if an older state is whole."""
    found = examine(run_dir)
    if not found.damages:
        return
    trained = kind == "train" and checkpoints(run_dir)
    if found.usable or (kind == "train" and not trained):
        start = f"checkpoint step={max(found.usable):06d}" if found.usable else "the start"
        _LOG.warning("%s; run %s continues from %s", found.damages[0], run_dir.name, start)
        return
    remedy = "restore it from a copy, or remove " + (
        f"{run_dir / 'checkpoints'} to train again from the first step" if trained else f"{run_dir} to begin again"
    )
    raise RunStoreError(f"{found.damages[0]}; {remedy}")


def write_parts(path: Path, level: str, tables: Iterable[pa.Table], steps: Sequence[int] | None = None) -> int:
    """Write a Parquet file of a level from tables, one after the other in memory; return the number of rows.

    steps: steps of a merged file. Without rows no file is written.
    """
    labels = dict(schema_with_metadata(level).metadata or {})
    if steps is not None:
        labels[STEPS_KEY.encode()] = json.dumps(list(steps)).encode()
    parts, rows = iter(tables), 0
    if (first := next(parts, None)) is None:
        return 0
    with (
        atomic_write(path, first.nbytes if steps is None else None) as file,
        pq.ParquetWriter(file, first.schema.with_metadata(labels), **parquet_options(level)) as writer,
    ):
        for table in itertools.chain([first], parts):
            writer.write_table(table.replace_schema_metadata(labels), row_group_size=row_group_size(level, table))
            rows += table.num_rows
    return rows


def parquet_options(level: str) -> dict[str, Any]:
    """Return compression and encoding options of a level for pyarrow's Parquet writers.

    lz4 for columns that are scanned, because it decompresses twice as fast as zstd; zstd for token arrays, which are
    read one row at a time.
    """
    one_at_a_time = level == "transcripts"
    different = _DIFFERENT if level != "calls" else set()
    fields = LEVELS[level]
    return {
        "compression": {
            leaf: "zstd" if one_at_a_time and pa.types.is_list(field.type) else "lz4"
            for field in fields
            for leaf in _leaves(field)
        },
        "use_dictionary": [leaf for field in fields if field.name not in different for leaf in _leaves(field)],
    }


def _leaves(field: pa.Field) -> list[str]:
    """Return Parquet's names of the columns with the values of a field."""
    if pa.types.is_map(field.type):
        return [f"{field.name}.key_value.key", f"{field.name}.key_value.value"]
    return [f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name]


def row_group_size(level: str, table: pa.Table) -> int:
    rows = _ROWS_PER_GROUP[level]
    if level != "transcripts" or not table.num_rows:
        return rows
    tokens = sum(len(chunk.values) for chunk in table["response_ids"].chunks) or table["messages"].nbytes // 4
    return max(1, min(rows, _TOKENS_PER_ROW_GROUP * table.num_rows // max(tokens, 1)))


def rewrite_with_steps(path: Path, level: str, steps: Sequence[int]) -> None:
    """Replace a merged file by one with fewer steps."""
    table = with_all_columns(filter_steps(read_parquet(path), steps), check_file(path, level).lacking)
    stage = path.parent.name.removeprefix("stage=")
    smaller = step_file(path.parents[2], level, stage, min(steps), max(steps))
    write_parts(smaller, level, [table], steps)
    if smaller != path:
        path.unlink()


def write_rollup(run_dir: Path, rollup: pa.Table) -> None:
    with atomic_write(run_dir / "rollup.parquet", rollup.nbytes) as file:
        marks = {VERSION_KEY: str(SCHEMA_VERSION), LEVEL_KEY: "rollup"}
        # The file has many short columns: without compression and statistics it is smaller and faster to read.
        options = {"compression": "none", "use_dictionary": ["run_id", "stage"], "write_statistics": False}
        pq.write_table(rollup.replace_schema_metadata(marks), file, **options)


def _line(line: dict[str, Any]) -> bytes:
    return (json.dumps(json_safe(line), ensure_ascii=False) + "\n").encode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
