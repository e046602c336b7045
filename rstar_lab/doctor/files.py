"""Files of other tools: what a file holds, its rollouts, and its metrics.

A file is recognised by its name and its first rows. A row that cannot be read is left out and counted, so that a torn or mixed file
is never read in silence.
"""

import gzip
import io
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet as pq

from rstar_lab.common.errors import UserError
from rstar_lab.doctor import tensorboard, wandb
from rstar_lab.doctor.metric_names import canonical
from rstar_lab.doctor.rollout_rows import (
    COMPLETIONS,
    PROMPTS,
    STEPS,
    USED,
    converted,
    first,
    is_number,
    is_trace,
)
from rstar_lab.exchange import importers
from rstar_lab.exchange.atif import import_atif
from rstar_lab.exchange.import_rows import (
    REWARDS_FILE,
    Row,
    number_in_name,
    step_number,
    write_run,
)
from rstar_lab.runs.files import bounded_lines, open_to_read, parse_json, read_text
from rstar_lab.untrusted.text import counted

FIRST_ROWS = 20  # rows of a file that are looked at to recognise it
Values = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Files of one kind that belong to one run.

    Args:
        kind: trl, inspect, atif, verl, verifiers, prime-rl or messages for rollouts; metrics.
        folder: Folder that they are in, without folders of single steps and checkpoints.
        files: The files.
    """

    kind: str
    folder: Path
    files: tuple[Path, ...]


def sources(path: Path) -> tuple[list[Source], list[str]]:
    """Return what is known at `path`, and a line for each data file that was not understood."""
    found: dict[tuple[str, Path, str], list[Path]] = {}
    notes = []
    for file in sorted(_files(path), key=lambda file: (file.parent, number_in_name(file), file.name)):
        try:
            kind = _kind(file)
        except OSError as error:
            notes.append(f"{file.name}: cannot be read: {error}")
            continue
        if kind is None:
            if note := _unknown(file):
                notes.append(note)
            continue
        folder = (_step_folder(file) or file).parent
        # Harbor writes JOB/TRIAL/agent/trajectory.json.
        if kind == "atif" and folder.name == "agent" and path in folder.parents[1:]:
            folder = folder.parents[1]
        # A dump of several steps has a number in the names of its files; other files are runs of their own.
        series = "" if kind in ("trl", "atif") or file.name.startswith(("events.", "trainer_")) else _series(file)
        found.setdefault((kind, folder, series), []).append(file)
    return [Source(kind, folder, tuple(files)) for (kind, folder, _), files in found.items()], notes


def _step_folder(file: Path) -> Path | None:
    """Return the folder of a single step or checkpoint that a file is in, such as `step_3` of `step_3/train/all/traces.jsonl`."""
    folders = list(file.parents)[:3]
    return next(
        (folder for folder in folders if re.fullmatch(r"(step|checkpoint|global_step)[_-]\d+", folder.name)), None
    )


def _series(file: Path) -> str:
    return re.sub(r"\d+", "", file.name.partition(".")[0]) if _has_rows(file) else file.name


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        if {"all", "effective"} <= set(folders):  # prime-rl writes the rollouts that it trains on a second time
            folders.remove("effective")
        yield from (file for name in names if (file := Path(folder, name)).is_file())


def _kind(file: Path) -> str | None:
    """Return the kind of a file, None if it is not known."""
    name = file.name.removesuffix(".gz")
    if name.startswith("completions") and name.endswith(".parquet"):
        return "trl"
    if name.endswith(".eval"):
        return "inspect"
    if name == "trainer_state.json" or name.endswith(".wandb") or name.startswith("events.out.tfevents"):
        return "metrics"
    if name.endswith(".json") and _begins(file, b'"ATIF-v'):
        return "atif"
    if name.endswith(".json") and _begins(file, b'"eval"', start=b"{") and _begins(file, b'"task"'):
        return "inspect"
    return _kind_of_rows(file) if _has_rows(file) else None


def _has_rows(file: Path) -> bool:
    name = file.name.removesuffix(".gz")
    return name.endswith((".jsonl", ".ndjson")) or (name.endswith(".json") and _begins(file, b"", start=b"["))


def _begins(file: Path, word: bytes, start: bytes = b"") -> bool:
    with _opened(file) as stream:
        head = stream.read(4096)
    return word in head and head.lstrip().startswith(start)


def _kind_of_rows(file: Path) -> str | None:
    for _, row in islice(rows(file, []), FIRST_ROWS):
        if isinstance(row.get("messages"), list):
            return "messages"
        if is_trace(row) or (first(row, PROMPTS) is not None and isinstance(first(row, COMPLETIONS), str | list)):
            if _step_folder(file):
                return "prime-rl"
            if is_trace(row):
                return "verifiers"
            return "verl" if {"input", "output"} <= set(row) or file.stem.partition(".")[0].isdigit() else "verifiers"
        texts = [
            value for value in row.values() if isinstance(value, list) or (isinstance(value, str) and len(value) > 100)
        ]
        if not texts and any(map(canonical, _metrics_of(row))):
            return "metrics"
    return None


def _unknown(file: Path) -> str | None:
    """Return a line about a file with data that is not understood, None for files that are no data."""
    if not _has_rows(file):
        return f"{file.name}: not a known format" if file.suffix in (".csv", ".parquet", ".pkl", ".npz") else None
    broken: list[str] = []
    _, row = next(rows(file, broken), ("", None))
    if row is None and any("cannot be read" in note for note in broken):
        return broken[0]
    if row is None and file.name.removesuffix(".gz").endswith(".json"):
        return None
    keys = f"the first row has the keys {', '.join(map(str, list(row)[:8]))}" if row else "it has no JSON objects"
    return f"{file.name}: not understood; {keys}"


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacked. Raises OSError if it cannot be read, is no archive, or unpacks to far more than its size."""
    with open_to_read(file) as opened:
        if file.suffix != ".gz":
            yield bounded_lines(opened)
            return
        most = importers.MAX_UNPACKED_BYTES + importers.MAX_UNPACKED_RATIO * file.stat().st_size
        try:
            yield bounded_lines(io.BufferedReader(_Unpacked(opened, most)))
        except (EOFError, zlib.error) as error:
            raise OSError(f"{file.name} is not a complete archive: {error}") from error


class _Unpacked(io.RawIOBase):
    """Reads at most `most` bytes of an archive."""

    def __init__(self, packed: IO[bytes], most: int) -> None:
        self._file, self._left = gzip.GzipFile(fileobj=packed), most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise OSError("it unpacks to far more than its size")
        buffer[: len(data)] = data
        return len(data)


def rows(file: Path, notes: list[str]) -> Iterator[tuple[str, Row]]:
    """Yield (place, object) of a file of JSON lines or a JSON list. Appends a note about what is not an object."""
    broken = []
    try:
        with _opened(file) as stream:
            lines: Iterable[Any] = stream
            if file.name.removesuffix(".gz").endswith(".json"):
                lines = parse_json(stream.read())
            for number, line in enumerate(lines, 1):
                if isinstance(line, bytes):
                    if not line.strip():
                        continue
                    try:
                        line = parse_json(line.decode("utf-8", "replace"))
                    except ValueError:
                        line = None
                if isinstance(line, dict):
                    yield f"{file.name}:{number}", line
                else:
                    broken.append(number)
    except (OSError, ValueError, MemoryError) as error:
        notes.append(f"{file.name}: cannot be read to its end: {error}")
    if broken:
        notes.append(
            f"{file.name}: left out: {counted(len(broken), 'line')} without a JSON object, first line {broken[0]}"
        )


# Rollouts


def import_rollouts(source: Source, runs_dir: Path, run_id: str, notes: list[str]) -> Path:
    """Write the rollouts of a source as a run and return its folder. Appends notes about rows that are left out.

    Rollouts of files with lines are named after their place, such as `6.jsonl:31`.
    """
    known: dict[str, Callable[..., Path]] = {
        "trl": partial(importers.import_trl, reward="sum"),
        "inspect": partial(importers.import_inspect, scorer="first"),
        "atif": import_atif,
    }
    if source.kind not in known:
        return write_run(_rollouts(source, notes), source.folder, runs_dir, run_id, source.kind)
    place = source.folder if len(source.files) > 1 else source.files[0]
    run = known[source.kind](place, runs_dir, run_id=run_id)
    parts = pq.read_schema(run / REWARDS_FILE).names[1:] if (run / REWARDS_FILE).exists() else []
    if len(parts) > 1:
        how = "the first score" if source.kind == "inspect" else "the sum"
        notes.append(f"{source.folder.name}: the reward is {how} of {', '.join(parts)}")
    return run


def _rollouts(source: Source, notes: list[str]) -> Iterator[Row]:
    read: list[Row] = []
    left_out: list[str] = []
    other: dict[str, None] = {}
    for file in source.files:
        if source.kind == "prime-rl" and (file.name.startswith("eval") or "eval" in file.parts[-3:-1]):
            notes.append(f"{file.name}: evaluations of prime-rl are not read")
            continue
        for place, row in rows(file, notes):
            try:
                read += list(converted(row, place, step_number(_step(row, file), place, "step")))
            except UserError as error:
                left_out.append(str(error))
                continue
            if not is_trace(row):
                other |= dict.fromkeys(name for name, own in row.items() if name not in USED and not is_number(own))
    if left_out:
        names = list(dict.fromkeys(file.name for file in source.files))
        place = names[0] if len(names) == 1 else source.folder.name
        notes.append(f"{place}: left out: {counted(len(left_out), 'row')}, the first one: {left_out[0]}")
    if other:
        notes.append(f"{counted(len(other), 'column')} of the rollouts not read: {', '.join(list(other)[:6])}")
    # An id that no two rows share is that of the rollout, not of the problem.
    ids = [str(row["row_id"]) for row in read if row.get("row_id") is not None]
    if len(ids) == len(read) and (len(set(ids)) < len(ids) or len({row["question"] for row in read}) == len(ids)):
        for row, own in zip(read, ids, strict=True):
            row["problem_id"] = row["problem_id"] or own
    yield from read


def _step(row: Row, file: Path) -> Any:
    step = first(row, STEPS)
    if step is None and (folder := _step_folder(file)):
        step = number_in_name(folder)
    return step if step is not None else number_in_name(file)


# Metrics


def metric_lines(file: Path, notes: list[str]) -> Iterator[tuple[int, Values]]:
    """Yield (step, {name: value}) of a file with metrics. Values that are no numbers are None; lines without a step are left out."""
    try:
        for step, values in _metric_lines(file, notes):
            if is_number(step) and 0 <= step < 2**31 and step == int(step):
                yield int(step), {name: value if is_number(value) else None for name, value in values.items()}
    except OSError as error:
        notes.append(f"{file.name}: cannot be read: {error}")


def _metric_lines(file: Path, notes: list[str]) -> Iterator[tuple[Any, Values]]:
    if file.name == "trainer_state.json":
        try:
            lines = parse_json(read_text(file, "replace"))["log_history"]
            yield from ((line.get("step"), line) for line in lines if isinstance(line, dict))
        except (OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"{file.name}: no log_history can be read: {error}")
    elif file.suffix == ".wandb":
        yield from wandb.history(file)
    elif file.name.startswith("events.out.tfevents"):
        yield from tensorboard.scalars(file)
    else:
        counted = False
        for number, (_, row) in enumerate(rows(file, notes), 1):
            values, step = _metrics_of(row), first(row, STEPS)
            if step is None:
                step, counted = number, True
            yield step, values
        if counted:
            notes.append(f"{file.name}: rows without a step were numbered")


def _metrics_of(row: Row) -> Values:
    """Return the metrics of a line: those in `data`, as verl writes them, or all; nested ones under names with slashes."""
    found: Values = {}
    for name, value in (row["data"] if isinstance(row.get("data"), dict) else row).items():
        if isinstance(value, dict):
            found |= {f"{name}/{inner}": own for inner, own in value.items() if is_number(own)}
        else:
            with suppress(TypeError, ValueError):
                found[name] = float(value) if isinstance(value, str) else value if is_number(value) else None
    return {name: value for name, value in found.items() if value is not None}
