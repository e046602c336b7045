"""Reading a run while it is written: a step exists exactly when its line in metrics.jsonl does.

What lies beside that (temporary files, files of steps without a line, the rest of a step that was cut) is never read.
A file that should be whole and is not raises RunStoreError; nothing is skipped in silence.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rstar_lab.runs.errors import RunStoreError
from rstar_lab.runs.lock import is_locked
from rstar_lab.runs.schema import LEVEL_KEY, LEVELS, SCHEMA_VERSION, VERSION_KEY, step_range_of
from rstar_lab.runs.tables import ROLLUP

_MARK = re.compile(rb'^\{"stage": "([A-Za-z0-9._-]+)", "step": (\d+)[,}].*\}$', re.MULTILINE)
_REQUIRED = {"schema_version", "run_id", "kind", "status"}
STEPS_KEY = "rstar_lab.steps"  # in merged files: the steps whose rows they hold


@dataclass(frozen=True)
class StoredFile:
    """One Parquet file and the committed steps to read from it; `partial`: it holds rows of other steps too."""

    path: Path
    stage: str
    steps: tuple[int, ...]
    partial: bool
    rows: int  # of the whole file


class RunReader:
    """One run's folder. Everything but its id is read anew at each call, so that a reader kept open sees a run grow."""

    def __init__(self, run_dir: str | Path):
        """Raises RunStoreError where the folder is no run, its run.json is broken, or a newer rstar_lab wrote it."""
        self.run_dir = Path(run_dir)
        self.run_id: str = self._read_info()["run_id"]  # fail now rather than at the first use

    @property
    def info(self) -> dict[str, Any]:
        """run.json."""
        return self._read_info()

    def _read_info(self) -> dict[str, Any]:
        path = self.run_dir / "run.json"
        try:
            info = json.loads(path.read_text())
        except FileNotFoundError:
            raise RunStoreError(f"{self.run_dir} is not a run: it has no run.json") from None
        except (OSError, ValueError) as error:
            raise RunStoreError(f"{path} cannot be read: {error}") from error
        if not isinstance(info, dict) or not info.keys() >= _REQUIRED:
            raise RunStoreError(f"{path} is not a run's description: it lacks {', '.join(sorted(_REQUIRED))}")
        _check_version(path, info["schema_version"])
        return info

    @property
    def status(self) -> str:
        """running, finished, failed, stopped; or interrupted: it says running, but nobody writes it any more."""
        status = self.info["status"]
        return "interrupted" if status == "running" and not is_locked(self.run_dir) else status

    def metrics(self) -> list[dict[str, Any]]:
        """One dict a committed step, in order: stage, step and what the writer measured."""
        return read_metrics_lines(self.run_dir / "metrics.jsonl")[0]

    def steps(self) -> dict[int, str]:
        """The committed steps and their stages, in order."""
        try:
            data = (self.run_dir / "metrics.jsonl").read_bytes()
        except FileNotFoundError:
            return {}
        marks = _MARK.findall(data, 0, data.rfind(b"\n") + 1)
        if len(marks) == data.count(b"\n"):  # every line begins as the writer begins it: no need to parse the rest
            return {int(step): stage.decode() for stage, step in marks}
        return {line["step"]: line["stage"] for line in self.metrics()}

    def files(self, level: str) -> list[StoredFile]:
        """The files of a level (trajectories, calls, transcripts) that hold the committed steps, checked.

        Raises RunStoreError naming the file where one is torn, foreign, of a newer schema, short of rows, or missing.
        """
        for _ in range(3):
            try:
                return self._files(level)
            except RunStoreError:
                if not is_locked(self.run_dir):
                    raise
                time.sleep(0.05)  # the writer may have cut or merged between two of our looks
        return self._files(level)

    def _files(self, level: str) -> list[StoredFile]:
        steps = self.steps()
        rows = self._rollup(steps).select(["step", f"rows_{level}"]).to_pydict()
        expected = dict(zip(rows["step"], rows[f"rows_{level}"], strict=True))
        found = self.scan(level, steps)
        for file in found:
            wanted = sum(expected[step] for step in file.steps)
            if not file.partial and file.rows != wanted:
                raise RunStoreError(f"{file.path} is damaged: it has {file.rows} rows where {wanted} were written")
        covered = {step for file in found for step in file.steps}
        if lost := [step for step in steps if step not in covered and expected[step]]:
            raise RunStoreError(f"{self.run_dir / level}: the file of step {lost[0]} is missing")
        return found

    def scan(self, level: str, steps: dict[int, str]) -> list[StoredFile]:
        """The files that lie there for `steps`, in order, whether or not all rows are; `files` is what to use."""
        covered: set[int] = set()
        found = []
        for path, first, last in _by_width(self.run_dir / level):
            stage = path.parent.name.removeprefix("stage=")
            inside = [step for step in range(first, last + 1) if steps.get(step) == stage and step not in covered]
            if not inside:
                continue
            footer = check_file(path, level)
            held = footer.steps or tuple(inside)
            inside = [step for step in inside if step in held]
            covered.update(inside)
            found.append(StoredFile(path, stage, tuple(inside), set(held) != set(inside), footer.rows))
        return sorted(found, key=lambda file: file.steps)

    def rollup(self) -> pa.Table:
        """n, mean and sd of every number column, one row a committed step (schema: tables.ROLLUP)."""
        return self._rollup(self.steps())

    def _rollup(self, steps: dict[int, str]) -> pa.Table:
        path = self.run_dir / "rollup.parquet"
        if not steps:
            return ROLLUP.empty_table()
        if not path.exists():
            raise RunStoreError(f"{path} is missing; `rstar-lab runs compact {self.run_dir.name}` makes it anew")
        check_file(path, "rollup")
        table = pq.ParquetFile(path).read()
        present = table["step"].to_pylist()
        if missing := steps.keys() - set(present):
            raise RunStoreError(
                f"{path} lacks step {min(missing)}; `rstar-lab runs compact {self.run_dir.name}` makes it anew"
            )
        return filter_steps(table, tuple(steps))

    def read(self, level: str, columns: list[str] | None = None) -> pa.Table:
        """All committed rows of a level. For large runs ask `rstar_lab.analysis`, which reads what a query needs."""
        names = columns or LEVELS[level].names
        tables = [read_steps(file, names) for file in self.files(level)]
        schema = pa.schema([LEVELS[level].field(name) for name in names])
        return pa.concat_tables(tables).replace_schema_metadata(None) if tables else schema.empty_table()

    def vocabulary(self) -> list[str] | None:
        """Text of every token id, None where the run has none."""
        path = self.run_dir / "tokens.json"
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunStoreError(f"{path} cannot be read: {error}") from error

    def checkpoints(self) -> dict[int, Path]:
        """Complete checkpoints by step, in order."""
        return checkpoints(self.run_dir)


def read_steps(file: StoredFile, columns: Sequence[str]) -> pa.Table:
    """Some columns of the rows of a file's steps; row groups without any of these are left unread."""
    first, last = min(file.steps), max(file.steps)
    inside = (pc.field("step") >= first) & (pc.field("step") <= last)
    table = pq.read_table(file.path, columns=sorted({*columns, "step"}), filters=inside, partitioning=None)
    if len(file.steps) <= last - first:  # the file may have rows of the steps between them
        table = filter_steps(table, file.steps)
    return table.select(columns)


def filter_steps(table: pa.Table, steps: Sequence[int]) -> pa.Table:
    """The rows of these steps."""
    return table.filter(pc.is_in(table["step"], pa.array(steps, pa.int32())))


@dataclass(frozen=True)
class Footer:
    rows: int
    steps: tuple[int, ...]  # empty but in merged files


def check_file(path: Path, level: str) -> Footer:
    """Is this a whole file of the store that this version can read? Raises RunStoreError that names it."""
    try:
        stat = path.stat()
    except OSError as error:
        raise RunStoreError(f"{path} cannot be read: {error.strerror}") from error
    return _check_file(path, level, stat.st_mtime_ns, stat.st_size, stat.st_ino)


@lru_cache(maxsize=200_000)
def _check_file(path: Path, level: str, *_state: int) -> Footer:
    try:
        footer = pq.read_metadata(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise RunStoreError(f"{path} is torn or no Parquet file: {str(error).splitlines()[0]}") from error
    marks = footer.metadata or {}
    if VERSION_KEY.encode() not in marks or marks.get(LEVEL_KEY.encode()) != level.encode():
        raise RunStoreError(f"{path} is not a file of {level} of a run store; take it out of the run's folder")
    _check_version(path, int(marks[VERSION_KEY.encode()]))
    return Footer(footer.num_rows, tuple(json.loads(marks.get(STEPS_KEY.encode(), b"[]"))))


def _check_version(path: Path, version: Any) -> None:
    if not isinstance(version, int) or version < 1:
        raise RunStoreError(f"{path} has schema version {version!r}, which never was; is it a run store's file?")
    if version > SCHEMA_VERSION:
        raise RunStoreError(
            f"{path} has schema version {version}; this rstar_lab reads up to {SCHEMA_VERSION}: upgrade rstar_lab"
        )


def _by_width(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """The store's files of a level, the widest merged ones first: they stand for the step files inside their range."""
    named = [(path, *span) for path in folder.glob("stage=*/*.parquet") if (span := step_range_of(path))]
    yield from sorted(named, key=lambda item: (item[1] - item[2], item[1]))


def read_metrics_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of metrics.jsonl and their size in bytes; a last line without its end was never committed."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    end = data.rfind(b"\n") + 1
    lines = []
    for number, line in enumerate(data[:end].splitlines(), 1):
        try:
            value = json.loads(line)
            if not (isinstance(value["step"], int) and isinstance(value["stage"], str)):
                raise ValueError("step or stage missing")
        except (ValueError, KeyError, TypeError) as error:
            raise RunStoreError(f"{path}, line {number} is damaged: {error}") from error
        lines.append(value)
    return lines, end


def checkpoints(run_dir: Path) -> dict[int, Path]:
    found = {
        path.name.removeprefix("step="): path for path in (run_dir / "checkpoints").glob("step=*") if path.is_dir()
    }
    return {int(step): found[step] for step in sorted(found) if step.isdigit()}


def list_runs(runs_dir: str | Path) -> list[RunReader]:
    """The runs inside a folder, the oldest first; folders without a run.json are passed over.

    Raises RunStoreError where `runs_dir` is missing or one of its runs cannot be read.
    """
    readers = [RunReader(folder) for folder in run_folders(runs_dir)]
    return sorted(readers, key=lambda reader: (reader.info.get("created") or "", reader.run_id))


def run_folders(runs_dir: str | Path) -> list[Path]:
    """Folders of `runs_dir` that hold a run, by name."""
    root = Path(runs_dir)
    if not root.is_dir():
        raise RunStoreError(f"there is no folder {root}; name the folder of the runs by --runs-dir")
    return sorted(path.parent for path in root.glob("*/run.json") if not path.parent.name.startswith("."))
