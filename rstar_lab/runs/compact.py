"""Merge the step files of a run into few larger files, because opening thousands of files is slow.

A merged file is renamed into place and replaces every step file inside its range; these are deleted afterwards. If the
process is killed in between, both exist and readers use the merged one. Files with an uncommitted step stay unchanged: its
line in metrics.jsonl may be damaged.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pyarrow as pa

from rstar_lab.common.errors import UserError
from rstar_lab.runs.files import name_disk_errors
from rstar_lab.runs.lock import RunLock
from rstar_lab.runs.reader import RunReader, StoredFile, filter_steps, steps_of_file, with_all_columns
from rstar_lab.runs.schema import LEVELS, TRAJECTORIES, step_file
from rstar_lab.runs.tables import ROLLUP, rollup_row
from rstar_lab.runs.writer import row_group_size, write_parts, write_rollup
from rstar_lab.untrusted.parquet import read_footer, read_parquet

# Maximum size of a merged file. It bounds the additional disk space that a compaction needs.
_MERGED_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Compacted:
    """Number of files of a run before and after."""

    before: int
    after: int


def compact(run_dir: str | Path) -> Compacted:
    """Merge the step files of a run, and rebuild its rollup if it is missing or incomplete.

    Raises RunLocked if a process is writing the run, RunStoreError if a file is damaged or the disk is full. The run is
    then unchanged.
    """
    run_dir = Path(run_dir)
    reader = RunReader(run_dir)
    with name_disk_errors(run_dir):
        lock = RunLock(run_dir)
    try:
        _restore_rollup(reader)
        before = after = 0
        steps = reader.steps()
        for level in LEVELS:
            files = reader.files(level)
            complete = [file for file in files if _is_committed(file.path, level, steps)]
            before += len(files)
            batches = _batches(complete)
            after += len(batches) + len(files) - len(complete)
            for batch in batches:
                if len(batch) > 1 or batch[0].partial:
                    _merge(run_dir, level, batch)
            _remove_shadowed(run_dir, level, steps)
        metrics = run_dir / "metrics.jsonl"
        if metrics.exists():
            metrics.touch()  # open readers notice the change by the modification time
        return Compacted(before, after)
    finally:
        lock.release()


def _batches(files: list[StoredFile]) -> list[list[StoredFile]]:
    """Group consecutive files of one stage into batches of at most _MERGED_BYTES."""
    batches: list[list[StoredFile]] = []
    for _, neighbours in groupby(files, key=lambda file: file.stage):
        size = _MERGED_BYTES
        for file in neighbours:
            if size + file.path.stat().st_size > _MERGED_BYTES:
                batches.append([])
                size = 0
            batches[-1].append(file)
            size += file.path.stat().st_size
    return batches


def _merge(run_dir: Path, level: str, batch: list[StoredFile]) -> None:
    steps = [step for file in batch for step in file.steps]
    target = step_file(run_dir, level, batch[0].stage, steps[0], steps[-1])
    write_parts(target, level, _row_groups(batch, level), steps)
    with name_disk_errors(target):
        for file in batch:
            if file.path != target:
                file.path.unlink()


def _row_groups(batch: list[StoredFile], level: str) -> Iterator[pa.Table]:
    """Yield the rows of the committed steps of files, in tables of at least one row group."""
    table = LEVELS[level].empty_table()
    for file in batch:
        for group in range(read_footer(file.path).num_row_groups):
            rows = with_all_columns(read_parquet(file.path, groups=[group]), file.lacking).select(LEVELS[level].names)
            rows = filter_steps(rows, file.steps) if file.partial else rows
            table = pa.concat_tables([table, rows.replace_schema_metadata(None)])
            if table.num_rows >= row_group_size(level, table):
                yield table
                table = LEVELS[level].empty_table()
    if table.num_rows:
        yield table


def _remove_shadowed(run_dir: Path, level: str, steps: dict[int, str]) -> None:
    """Delete the files that a killed compaction left behind: merged files have all their steps, so readers ignore them."""
    used = {file.path for file in RunReader(run_dir).files(level)}
    for path in (run_dir / level).glob("stage=*/*.parquet"):
        if path not in used and _is_committed(path, level, steps):
            path.unlink()


def _is_committed(path: Path, level: str, steps: dict[int, str]) -> bool:
    """Return whether a file is part of the run and all its steps are committed. steps: stage of each committed step."""
    stage, held = path.parent.name.removeprefix("stage="), steps_of_file(path, level)
    return held is not None and all(steps.get(step) == stage for step in held)


def _restore_rollup(reader: RunReader) -> None:
    """Rebuild rollup.parquet from the rows if it is missing, truncated or lacks a committed step."""
    try:
        reader.rollup()
        return
    except UserError:
        steps = reader.steps()
    counts = {step: dict.fromkeys(LEVELS, 0) for step in steps}
    tables = dict.fromkeys(steps, TRAJECTORIES.empty_table())
    for level in LEVELS:
        for file in reader.scan(level, steps):
            table = read_parquet(file.path, None if level == "trajectories" else ["step"])
            for step in file.steps:
                rows = filter_steps(table, [step])
                counts[step][level] = rows.num_rows
                if level == "trajectories":
                    tables[step] = rows
    rollup_rows = [
        rollup_row(tables[step], counts[step], {"run_id": reader.run_id, "stage": stage, "step": step})
        for step, stage in steps.items()
    ]
    write_rollup(reader.run_dir, pa.Table.from_pylist(rollup_rows, ROLLUP))
