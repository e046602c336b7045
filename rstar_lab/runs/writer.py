"""Writing a run: whole steps or nothing, whatever kills the writer.

The files of a step are put in place first and the line in metrics.jsonl last; the line is the step. `cut` goes the
other way round: the lines go first, then the files. So at any moment the lines tell the truth, and opening a run again
removes what has no line.
"""

import json
import os
import shutil
from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from rstar_lab.runs import provenance
from rstar_lab.runs.errors import RunStoreError
from rstar_lab.runs.files import atomic_write, json_safe, name_disk_errors, remove_folder, sync_folder, write_json
from rstar_lab.runs.lock import RunLock
from rstar_lab.runs.reader import STEPS_KEY, RunReader, check_file, checkpoints, filter_steps, read_metrics_lines
from rstar_lab.runs.schema import (
    LEVEL_KEY,
    LEVELS,
    SCHEMA_VERSION,
    VERSION_KEY,
    is_valid_name,
    schema_with_metadata,
    step_file,
    step_range_of,
)
from rstar_lab.runs.tables import ROLLUP, rollup_row, table_of

# No two rows have the same: a dictionary of them would be one more copy to read.
_DIFFERENT = {"traj_id", "messages"}
_TOKENS_A_ROW_GROUP = 250_000  # one transcript is read by decoding its row group: a few milliseconds
# Few enough that a list sorted by step reads some groups of a long run, enough that reading them all costs no more.
_ROWS_A_GROUP = {"trajectories": 32_768, "calls": 131_072, "transcripts": 1000}


class RunWriter:
    """The one writer of a run; a context manager.

    Leaving the block releases the run. Without a `finish` before that, an error marks it failed, Ctrl-C stopped.
    """

    def __init__(self, run_dir: Path, lock: RunLock, info: dict[str, Any]):
        """For `open` only."""
        self.run_dir, self.attempt = run_dir, info["attempts"]
        self._lock, self._info = lock, info
        self._metrics = run_dir / "metrics.jsonl"
        self.last_step: int | None = None  # the last committed one
        self._rollup = ROLLUP.empty_table()
        self._repair()

    @classmethod
    def open(
        cls,
        runs_dir: str | Path,
        run_id: str,
        *,
        kind: str,
        recipe: dict[str, Any],
        seed: int,
        parent: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Self:
        """Create the run, or take it up again where it is there (attempt + 1) and remove what was left unfinished.

        kind: train, evaluate, chat or import. parent: {"run", "step"} this one starts from.
        extra: kept in run.json under "extra". Secrets in recipe and extra are redacted.
        Raises RunLocked while another process writes the run, RunStoreError where it is of another kind or cannot be
        read or written.
        """
        if not is_valid_name(run_id):
            raise RunStoreError(f"run id {run_id!r} cannot be a folder's name: use letters, digits, '.', '_' and '-'")
        run_dir = Path(runs_dir) / run_id
        with name_disk_errors(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = RunLock(run_dir)
        try:
            now = _now()
            old = RunReader(run_dir).info if (run_dir / "run.json").exists() else None
            if old and old["kind"] != kind:
                raise RunStoreError(f"run {run_dir} is of kind {old['kind']}, not {kind}: choose another run id")
            info = {
                "schema_version": SCHEMA_VERSION,
                "run_id": run_id,
                "kind": kind,
                "status": "running",
                "created": old["created"] if old else now,
                "started": now,
                "ended": None,
                "attempts": old["attempts"] + 1 if old else 1,
                "seed": seed,
                "parent": parent,
                "recipe": provenance.redact(recipe),
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
                # Ctrl-C reaches a coroutine as its cancellation.
                stopped = issubclass(kind, KeyboardInterrupt | CancelledError)
                self.finish("stopped" if stopped else "failed", error=str(error) or kind.__name__)
        except RunStoreError:
            if kind is None:  # a full disk must not hide what ended the block
                raise
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the run as it stands; without a `finish` before, readers see it as interrupted."""
        self._lock.release()

    def write_step(
        self,
        stage: str,
        step: int,
        *,
        trajectories: Sequence[dict[str, Any]],
        calls: Sequence[dict[str, Any]],
        transcripts: Sequence[dict[str, Any]],
        metrics: dict[str, Any],
    ) -> None:
        """Write a step, all of it or nothing of it.

        Rows are dicts of the schema's columns; run, attempt, stage and step are filled in. metrics: JSON values.
        Raises ValueError for a row the schema does not know or a step that is not past the last one, RunStoreError
        where the disk is full.
        """
        fill = {"run_id": self._info["run_id"], "attempt": self.attempt, "stage": stage, "step": step}
        rows = {"trajectories": trajectories, "calls": calls, "transcripts": transcripts}
        tables = {}
        for level, level_rows in rows.items():
            names = LEVELS[level].names
            tables[level] = table_of(level, level_rows, {name: value for name, value in fill.items() if name in names})
        self.write_tables(stage, step, tables, metrics)

    def write_tables(self, stage: str, step: int, tables: dict[str, pa.Table], metrics: dict[str, Any]) -> None:
        """`write_step` for rows that are Arrow tables of the levels' schemas already."""
        if not is_valid_name(stage):
            raise ValueError(f"stage {stage!r} cannot be a folder's name: use letters, digits, '.', '_' and '-'")
        last = self.last_step
        if step < 0 or (last is not None and step <= last):
            raise ValueError(
                f"step {step} does not come after step {last}, the last one of run {self.run_dir}; cut the run first"
            )
        for level, table in tables.items():
            if table.num_rows:
                write_table(step_file(self.run_dir, level, stage, step), level, table)
        counts = {level: tables[level].num_rows if level in tables else 0 for level in LEVELS}
        where = {"run_id": self._info["run_id"], "stage": stage, "step": step, "attempt": self.attempt}
        row = rollup_row(tables["trajectories"], counts, where)
        rollup = pa.concat_tables([self._rollup, pa.Table.from_pylist([row], ROLLUP)])
        write_rollup(self.run_dir, rollup)
        self._append({"stage": stage, "step": step} | metrics)
        self._rollup, self.last_step = rollup, step

    def cut(self, step: int) -> None:
        """Drop the steps and checkpoints after `step`: a run that resumes from the checkpoint of `step` calls this."""
        lines, _ = read_metrics_lines(self._metrics)
        kept = [line for line in lines if line["step"] <= step]
        if len(kept) < len(lines):
            with atomic_write(self._metrics) as file:
                file.write(b"".join(_line(line) for line in kept))
        for number, folder in checkpoints(self.run_dir).items():
            if number > step:
                remove_folder(folder)
        self._repair()

    def write_vocabulary(self, tokens: Sequence[str]) -> None:
        """Keep the text of every token id, so that readers need no tokenizer."""
        if RunReader(self.run_dir).vocabulary() != list(tokens):
            write_json(self.run_dir / "tokens.json", [token.encode("utf-8", "replace").decode() for token in tokens])

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """A folder to fill, which becomes checkpoints/step=... when the block ends without error.

        Write the step before its checkpoint: a run that resumes there has no second chance to.
        """
        parent = self.run_dir / "checkpoints"
        hidden, final = parent / f".step={step:06d}.tmp", parent / f"step={step:06d}"
        with name_disk_errors(final):
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
        try:
            with name_disk_errors(final):
                yield hidden
                for path in hidden.rglob("*"):
                    if path.is_file():
                        with path.open("rb") as file:
                            os.fsync(file.fileno())
                remove_folder(final)
                hidden.replace(final)
                sync_folder(parent)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """The newest complete checkpoint."""
        found = checkpoints(self.run_dir)
        return max(found.items()) if found else None

    def keep_checkpoints(self, n: int) -> None:
        """Delete all checkpoints but the newest n."""
        for _, folder in sorted(checkpoints(self.run_dir).items(), reverse=True)[n:]:
            remove_folder(folder)

    def finish(self, status: str, error: str | None = None, result: dict[str, Any] | None = None) -> None:
        """Say how the run ended: finished, failed or stopped; `result` is kept in run.json."""
        if status not in ("finished", "failed", "stopped"):
            raise ValueError(f"status {status!r} is none of finished, failed, stopped")
        self._info |= {"status": status, "ended": _now(), "error": provenance.redact(error)}
        if result is not None:
            self._info["result"] = result
        write_json(self.run_dir / "run.json", self._info)

    def _append(self, line: dict[str, Any]) -> None:
        with name_disk_errors(self._metrics):
            with self._metrics.open("ab") as file:
                before = file.tell()
                try:
                    file.write(_line(line))
                    file.flush()
                    os.fsync(file.fileno())
                except BaseException:
                    os.ftruncate(file.fileno(), before)  # half a line must not get an end from the next one
                    raise

    def _repair(self) -> None:
        """Remove what no line stands for: the end of a torn line, files of uncommitted steps, temporary files."""
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
                if (span := step_range_of(path)) is None:
                    continue
                held = check_file(path, level).steps if span[0] < span[1] else span[:1]
                kept = tuple(step for step in held if steps.get(step) == path.parent.name.removeprefix("stage="))
                if not kept:
                    path.unlink()
                elif kept != held:
                    rewrite_with_steps(path, level, kept)
        self.last_step = max(steps, default=None)
        self._rollup = RunReader(self.run_dir).rollup()


def write_table(path: Path, level: str, table: pa.Table, steps: Sequence[int] | None = None) -> None:
    """One Parquet file of a level; `steps` for a merged one."""
    marks = {STEPS_KEY: json.dumps(list(steps))} if steps is not None else {}
    with atomic_write(path) as file:
        labels = schema_with_metadata(level).metadata | {key.encode(): value.encode() for key, value in marks.items()}
        table = table.replace_schema_metadata(labels)
        pq.write_table(table, file, row_group_size=row_group_size(level, table), **parquet_options(level))


def parquet_options(level: str) -> dict[str, Any]:
    """How a level's columns are packed: what pyarrow's Parquet writers take.

    What is scanned is packed by lz4, half as costly to read as zstd; what is read one row at a time by zstd.
    """
    one_at_a_time = level == "transcripts"
    different = _DIFFERENT if level != "calls" else set()
    fields = LEVELS[level]
    return {
        "compression": {
            _leaf(field): "zstd" if one_at_a_time and pa.types.is_list(field.type) else "lz4" for field in fields
        },
        "use_dictionary": [_leaf(field) for field in fields if field.name not in different],
    }


def _leaf(field: pa.Field) -> str:
    """What Parquet calls the column that holds the values of a field."""
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name


def row_group_size(level: str, table: pa.Table) -> int:
    rows = _ROWS_A_GROUP[level]
    if level != "transcripts" or not table.num_rows:
        return rows
    tokens = sum(len(chunk.values) for chunk in table["response_ids"].chunks) or table["messages"].nbytes // 4
    return max(1, min(rows, _TOKENS_A_ROW_GROUP * table.num_rows // max(tokens, 1)))


def rewrite_with_steps(path: Path, level: str, steps: Sequence[int]) -> None:
    """Replace a merged file by one of fewer steps."""
    table = filter_steps(pq.ParquetFile(path).read(), steps)
    stage = path.parent.name.removeprefix("stage=")
    smaller = step_file(path.parents[2], level, stage, min(steps), max(steps))
    write_table(smaller, level, table, steps)
    if smaller != path:
        path.unlink()


def write_rollup(run_dir: Path, rollup: pa.Table) -> None:
    with atomic_write(run_dir / "rollup.parquet") as file:
        marks = {VERSION_KEY: str(SCHEMA_VERSION), LEVEL_KEY: "rollup"}
        # Many short columns: the file is smaller and read sooner without what pays for long ones.
        options = {"compression": "none", "use_dictionary": ["run_id", "stage"], "write_statistics": False}
        pq.write_table(rollup.replace_schema_metadata(marks), file, **options)


def _line(line: dict[str, Any]) -> bytes:
    return (json.dumps(json_safe(line), ensure_ascii=False) + "\n").encode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
