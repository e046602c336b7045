"""Read a run, also while it is being written. A step is committed when its line is in metrics.jsonl.

Temporary files and files of uncommitted steps are ignored. A damaged file of a committed step raises UserError.
"""

import math
import os
import re
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from rstar_lab.common.errors import UserError
from rstar_lab.runs.errors import RunStoreError
from rstar_lab.runs.info import RunInfo, check_version, read_info, read_mirror
from rstar_lab.runs.lock import is_locked
from rstar_lab.runs.schema import ADDED_COLUMNS, LEVEL_KEY, LEVELS, STAGE, VERSION_KEY, step_range_of
from rstar_lab.runs.tables import ROLLUP
from rstar_lab.untrusted.files import parse_json, read_bytes, read_json, reading
from rstar_lab.untrusted.parquet import read_footer, read_parquet

_MARK = re.compile(rb'^\{"stage": "([A-Za-z0-9._-]+)", "step": (\d+)[,}].*\}$', re.MULTILINE)
MORE_ROWS = 10_000  # rows that a rollup may have for steps that are not committed; a few bytes can claim billions
STEPS_KEY = "rstar_lab.steps"  # metadata key of merged files: the steps that they contain


class Damage(NamedTuple):
    """A damaged or missing table: the committed steps that it affects, and the error."""

    steps: tuple[int, ...]
    error: UserError


@dataclass(frozen=True)
class StoredFile:
    """A Parquet file and the committed steps to read from it. partial: it also contains rows of other steps."""

    path: Path
    stage: str
    steps: tuple[int, ...]
    partial: bool
    rows: int  # number of rows in the file
    lacking: frozenset[str] = frozenset()  # columns that are newer than the file


class RunReader:
    """A run's folder. Every call reads the files again, so an open reader sees new steps."""

    def __init__(self, run_dir: str | Path):
        """Raises UserError if the folder is not a run, run.json is damaged, or its schema version is newer."""
        self.run_dir = Path(run_dir)
        self.run_id: str = self.info["run_id"]  # raises here rather than at the first use

    @property
    def info(self) -> RunInfo:
        """The content of run.json."""
        return read_info(self.run_dir)

    @property
    def status(self) -> str:
        """running, finished, failed, stopped, or interrupted (run.json says running, but no process is writing the run).

        A copy of a run on another machine (`rstar-lab jobs pull`) has the status that the run had there.
        """
        status = self.info["status"]
        if status != "running" or is_locked(self.run_dir):
            return status
        mirror = read_mirror(self.run_dir)
        return mirror["status"] if mirror else "interrupted"

    def metrics(self) -> list[dict[str, Any]]:
        """Return one dict per committed step, in order: stage, step and the metrics of the writer."""
        return read_metrics_lines(self.run_dir / "metrics.jsonl")[0]

    def steps(self) -> dict[int, str]:
        """Return {step: stage} of the committed steps, in order."""
        path = self.run_dir / "metrics.jsonl"
        data = read_bytes(path) if path.exists() else b""
        marks = _MARK.findall(data, 0, data.rfind(b"\n") + 1)
        # All lines start as the writer formats them, so parsing JSON is not needed.
        if len(marks) == data.count(b"\n") and all(len(step) < 10 for _, step in marks):
            return {int(step): stage.decode() for stage, step in marks}
        return {line["step"]: line["stage"] for line in self.metrics()}

    def files(self, level: str, leave_out_damaged: bool = False) -> list[StoredFile]:
        """Return the checked files of a level (trajectories, calls, transcripts) for the committed steps.

        Raises UserError, which names the file, if one is damaged, foreign, of a newer schema, incomplete or missing.
        """
        for _ in range(3):
            with suppress(UserError):
                return _undamaged(*self._files(level), leave_out_damaged)
            if not is_locked(self.run_dir):
                break
            time.sleep(0.05)  # the writer may have cut or merged files between two reads
        return _undamaged(*self._files(level), leave_out_damaged)

    def damages(self) -> list[Damage]:
        """Return the damaged and missing tables of the committed steps, in their order. Raises UserError for a damaged rollup."""
        return sorted((damage for level in LEVELS for damage in self._files(level)[1]), key=lambda damage: damage.steps)

    def _files(self, level: str) -> tuple[list[StoredFile], list[Damage]]:
        steps = self.steps()
        rows = self.rollup(steps, ("step", f"rows_{level}")).to_pydict()
        expected = dict(zip(rows["step"], rows[f"rows_{level}"], strict=True))
        stored, damages = self._scan(level, steps)
        for file in stored:
            wanted = sum(expected[step] for step in file.steps)
            if not file.partial and file.rows != wanted:
                message = f"{file.path} is damaged: it has {file.rows} rows where {wanted} were written"
                damages.append(Damage(file.steps, RunStoreError(message)))
        found = [file.steps for file in stored] + [damage.steps for damage in damages]
        covered = {step for steps_of_file in found for step in steps_of_file}
        if lost := [step for step in steps if step not in covered and expected[step]]:
            error = RunStoreError(f"{self.run_dir / level}: the file of step {lost[0]} is missing")
            damages.append(Damage(tuple(lost), error))
        return stored, damages

    def scan(self, level: str, steps: dict[int, str]) -> list[StoredFile]:
        """Return the files of `steps` in order, without a check that all rows exist. To read rows, use `files`."""
        return _undamaged(*self._scan(level, steps))

    def _scan(self, level: str, steps: dict[int, str]) -> tuple[list[StoredFile], list[Damage]]:
        covered: set[int] = set()
        stored, damages = list[StoredFile](), list[Damage]()
        ordered = sorted(steps)
        paths = (self.run_dir / level).glob("stage=*/*.parquet")
        spans = {path: span for path in paths if (span := step_range_of(path))}
        # Wide merged files come first, because they replace the files in their range.
        for path, (first, last) in sorted(spans.items(), key=lambda item: (item[1][0] - item[1][1], item[1][0])):
            stage = path.parent.name.removeprefix("stage=")
            inside = [
                step
                for step in ordered[bisect_left(ordered, first) : bisect_right(ordered, last)]
                if steps[step] == stage and step not in covered
            ]
            if not inside:
                continue
            try:
                footer = check_file(path, level)
                if not footer.steps and footer.span not in (None, (first, last)):
                    raise RunStoreError(f"{path} is damaged: it has rows of other steps")
            except UserError as error:
                damages.append(Damage(tuple(inside), error))
                covered.update(inside)
                continue
            held = footer.steps or tuple(inside)
            inside = [step for step in inside if step in held]
            covered.update(inside)
            stored.append(StoredFile(path, stage, tuple(inside), set(held) != set(inside), footer.rows, footer.lacking))
        return sorted(stored, key=lambda file: file.steps), damages

    def rollup(self, steps: dict[int, str] | None = None, columns: tuple[str, ...] | None = None) -> pa.Table:
        """Return n, mean and sd of number columns by committed step (schema: tables.ROLLUP). steps: of `steps`. columns: with `step`."""
        path, steps = self.run_dir / "rollup.parquet", self.steps() if steps is None else steps
        if not steps:
            return ROLLUP.empty_table()
        rebuild = f"`rstar-lab runs compact {self.run_dir.name}` rebuilds it"
        if not path.exists():
            raise RunStoreError(f"{path} is missing; {rebuild}")
        if (rows := check_file(path, "rollup").rows) > len(steps) + MORE_ROWS:
            raise RunStoreError(f"{path} is damaged: it has {rows} rows for {len(steps)} steps")
        stat = path.stat()
        table = _read_rollup(path, columns, stat.st_mtime_ns, stat.st_size, stat.st_ino)
        present = table["step"].to_pylist()
        if missing := steps.keys() - set(present):
            raise RunStoreError(f"{path} lacks step {min(missing)}; {rebuild}")
        return table if len(present) == len(steps) else filter_steps(table, tuple(steps))

    def read(self, level: str, columns: list[str] | None = None) -> pa.Table:
        """Return all committed rows of a level. For large runs use `rstar_lab.analysis`, which reads only what a query needs."""
        names = columns or LEVELS[level].names
        tables = [read_steps(file, names) for file in self.files(level)]
        schema = pa.schema([LEVELS[level].field(name) for name in names])
        return pa.concat_tables(tables).replace_schema_metadata(None) if tables else schema.empty_table()

    def vocabulary(self) -> list[str] | None:
        """Return the text of each token id, or None if the run has no vocabulary."""
        path = self.run_dir / "tokens.json"
        return read_json(path, list[str]) if path.exists() else None

    def checkpoints(self) -> dict[int, Path]:
        """Return {step: folder} of the complete checkpoints, in order."""
        return checkpoints(self.run_dir)

    def nearest_checkpoint(self, step: int) -> Path:
        """Return the checkpoint nearest to the weights that generated a step. Raises RunStoreError if none is stored."""
        stored = self.checkpoints()
        if not stored:
            raise RunStoreError(f"run {self.run_id} has no checkpoint: give model=FOLDER")
        return stored[min(stored, key=lambda number: (abs(number - (step - 1)), number))]


def _undamaged(stored: list[StoredFile], damages: list[Damage], leave_out: bool = False) -> list[StoredFile]:
    """Return the files. leave_out: without the damaged ones; otherwise the first error is raised."""
    if damages and not leave_out:
        raise damages[0].error
    lost = {step for damage in damages for step in damage.steps}
    return [file for file in stored if lost.isdisjoint(file.steps)]


def read_steps(file: StoredFile, columns: Sequence[str]) -> pa.Table:
    """Return columns of the rows of a file's steps. Row groups without these steps are not read."""
    stored = sorted({*columns, "step"} - file.lacking)
    table = with_all_columns(read_parquet(file.path, stored, row_groups_of(file)), file.lacking)
    return (filter_steps(table, file.steps) if file.partial else table).select(columns)


def row_groups_of(file: StoredFile) -> list[int] | None:
    """Return the row groups that can have rows of a file's steps, by the statistics of the column. None: all."""
    if not file.partial:
        return None
    spans = enumerate(_spans(read_footer(file.path)))
    return [group for group, (first, last) in spans if any(first <= step <= last for step in file.steps)]


def with_all_columns(table: pa.Table, lacking: Iterable[str]) -> pa.Table:
    """Return the table with columns of nulls for those of its level that are newer than its file."""
    for name in sorted(lacking):
        kind = next(schema.field(name).type for schema in LEVELS.values() if name in schema.names)
        table = table.append_column(name, pa.nulls(table.num_rows, kind))
    return table


def filter_steps(table: pa.Table, steps: Sequence[int]) -> pa.Table:
    """Return the rows of these steps."""
    import pyarrow.compute as pc

    numbers = [None, pa.py_buffer(array("i", steps))]  # pa.array() imports pandas
    chosen = pc.is_in(table["step"], pa.Array.from_buffers(pa.int32(), len(steps), numbers))
    return table if pc.all(chosen).as_py() else table.filter(chosen)


@dataclass(frozen=True)
class Footer:
    rows: int
    steps: tuple[int, ...]  # steps of a merged file; else empty
    span: tuple[int, int] | None  # first and last step of its rows; None if it has none, or no statistics
    lacking: frozenset[str]  # see StoredFile


def check_file(path: Path, level: str) -> Footer:
    """Return row count and steps of a file. Raises UserError if it is damaged, foreign or of a newer version."""
    with reading(path):
        stat = path.stat()
    return _check_file(path, level, stat.st_mtime_ns, stat.st_size, stat.st_ino)


def steps_of_file(path: Path, level: str) -> tuple[int, ...] | None:
    """Return the steps of a file of the store; None for another file. Raises UserError if a merged file is damaged."""
    span = step_range_of(path)
    return check_file(path, level).steps if span and span[0] < span[1] else span and span[:1]


@lru_cache(maxsize=200_000)
def _check_file(path: Path, level: str, *_state: int) -> Footer:
    footer = read_footer(path)
    marks = footer.metadata or {}
    if VERSION_KEY.encode() not in marks or marks.get(LEVEL_KEY.encode()) != level.encode():
        raise RunStoreError(f"{path} is not a {level} file of a run store; remove it from the run's folder")
    with reading(path, error=RunStoreError):
        version = marks[VERSION_KEY.encode()]
        check_version(int(version) if version.isdigit() and len(version) < 10 else version.decode(errors="replace"))
        stored = footer.schema.to_arrow_schema()
        steps = parse_json(marks.get(STEPS_KEY.encode(), b"[]"), "the list of its steps", tuple[int, ...])
    schema = LEVELS.get(level, ROLLUP)
    for field in stored:
        if field.name in schema.names and field.type != schema.field(field.name).type:
            expected = schema.field(field.name).type
            raise RunStoreError(f"{path}: column {field.name!r} has the type {field.type}; expected {expected}")
    needed = LEVELS[level].names if level in LEVELS else ["step", *map("rows_{}".format, LEVELS)]
    missing = frozenset(needed) - set(stored.names)
    lacking = missing.intersection(ADDED_COLUMNS.get(level, ()))
    if lost := missing - lacking:
        raise RunStoreError(f"{path} is damaged: it lacks the column {min(lost)!r}")
    first, last = zip(*_spans(footer), strict=True) if footer.num_row_groups else ((0,), (math.inf,))
    span = None if math.inf in last else (int(min(first)), int(max(last)))
    return Footer(footer.num_rows, steps, span, lacking)


def _spans(footer: pq.FileMetaData) -> list[tuple[float, float]]:
    """Return the first and the last step of each row group by its statistics; without them, 0 and infinity."""
    column = footer.schema.names.index("step")
    found = [footer.row_group(group).column(column).statistics for group in range(footer.num_row_groups)]
    return [(one.min, one.max) if one is not None and one.has_min_max else (0, math.inf) for one in found]


@lru_cache(maxsize=256)
def _read_rollup(path: Path, columns: tuple[str, ...] | None, *_state: int) -> pa.Table:
    return read_parquet(path, columns)


class _Line(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    stage: Annotated[str, Field(pattern=rf"^{STAGE}$")]
    step: Annotated[int, Field(ge=0, lt=2**31, strict=True)]


def read_metrics_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines of metrics.jsonl and their size in bytes. A last line without newline is not committed."""
    data = read_bytes(path) if path.exists() else b""
    end = data.rfind(b"\n") + 1
    lines = data[:end].splitlines()
    return [dict(parse_json(line, f"{path}, line {number}", _Line)) for number, line in enumerate(lines, 1)], end


def checkpoints(run_dir: Path) -> dict[int, Path]:
    folders = {
        path.name.removeprefix("step="): path for path in (run_dir / "checkpoints").glob("step=*") if path.is_dir()
    }
    return {int(step): folders[step] for step in sorted(folders) if step.isdecimal()}


def run_folders(runs_dir: str | Path) -> list[Path]:
    """Return the folders of `runs_dir` that contain a run, sorted by name."""
    root = Path(runs_dir)
    if not root.is_dir():
        raise RunStoreError(f"there is no folder {root}; set the folder of the runs with --runs-dir")
    names = (name for name in os.listdir(root) if not name.startswith("."))  # noqa: PTH208  faster than pathlib
    return [root / name for name in sorted(names) if os.access(f"{root}/{name}/run.json", os.F_OK)]


def find_runs_dir(runs_dir: str | Path = "", *, required: bool = False) -> Path:
    """Return the folder of runs as an absolute path; it may not exist yet. required: raise RunStoreError if it has no run.

    A given `runs_dir` is used as it is. Otherwise: the environment variable RSTAR_LAB_RUNS, else the nearest `runs`
    folder in the current folder or one above it, else `runs` beside the `notebooks` folder or in the current folder.
    """
    folder = _find(runs_dir)
    if required and not (folder / "run.json").exists() and not any(folder.glob("*/run.json")):
        raise RunStoreError(f"there is no run in {folder}: run `make demo` in the project's folder, or set runs_dir")
    return folder


def _find(runs_dir: str | Path) -> Path:
    if runs_dir:
        return Path(runs_dir).absolute()
    if configured := os.environ.get("RSTAR_LAB_RUNS"):
        return Path(configured).absolute()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if any((folder / "runs").glob("*/run.json")):
            return folder / "runs"
    return (here.parent if here.name == "notebooks" else here) / "runs"
