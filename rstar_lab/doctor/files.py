"""Files of other tools: what a file holds, its rollouts, and its metrics.

A file is recognised by its name and its first rows. A row that cannot be read is left out and counted, so that a torn or mixed file
is never read in silence.
"""

import difflib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError, install_hint
from rstar_lab.doctor.metric_names import canonical
from rstar_lab.exchange import importers
from rstar_lab.exchange.import_rows import Row, digest, number_in_name, number_of, step_number, write_run
from rstar_lab.exchange.rollout_rows import USED, converted, first, is_number, is_trace
from rstar_lab.runs.schema import REWARDS_FILE
from rstar_lab.untrusted.files import DataError, open_stream, parse_json, read_json, reading
from rstar_lab.untrusted.parquet import read_footer
from rstar_lab.untrusted.text import counted

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FIRST_ROWS = 20  # rows of a file that are looked at to recognise it
BLANK = object()  # an empty line
Values = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Files of one kind that belong to one run.

    Args:
        kind: trl, inspect, verl, verifiers, prime-rl or messages for rollouts; metrics.
        folder: Folder that they are in, without folders of single steps and checkpoints.
        files: The files.
    """

    kind: str
    folder: Path
    files: tuple[Path, ...]


def existing(path: Path) -> Path:
    """Return a path, or that of a run id in runs/. Raises UserError that names what is written alike."""
    places = (path, Path("runs") / path)
    if found := [place for place in places if place.exists()]:
        return found[0]
    names = [other.name for place in places for other in place.parent.glob("*")]
    near = difflib.get_close_matches(path.name, names, n=1)
    meant = f"; did you mean {near[0]}?" if near else ": give a run, its folder, such as runs/NAME, or a log"
    raise UserError(f"{path} does not exist{meant}")


def sources(path: Path) -> tuple[list[Source], list[str]]:
    """Return what is known at `path`, and a line for each data file that was not understood."""
    found: dict[tuple[str, Path, str], list[Path]] = {}
    notes = []
    for file in sorted(_files(path), key=lambda file: (file.parent, number_in_name(file), file.name)):
        try:
            kind = _kind(file)
        except DataError as error:
            notes.append(_short(error, file))
            continue
        if kind is None:
            notes += filter(None, [_unknown(file)])
            continue
        folder = (_step_folder(file) or file).parent
        # A dump of several steps has a number in the names of its files; other files are runs of their own.
        series = "" if kind == "trl" or file.name.startswith(("events.", "trainer_")) else _series(file)
        found.setdefault((kind, folder, series), []).append(file)
    return [Source(kind, folder, tuple(files)) for (kind, folder, _), files in found.items()], notes


def _step_folder(file: Path) -> Path | None:
    """Return the folder of a single step or checkpoint that a file is in, such as `step_3` of `step_3/train/all/traces.jsonl`."""
    number = re.compile(r"(step|checkpoint|global_step)[_-]\d+")
    return next((folder for folder in list(file.parents)[:3] if number.fullmatch(folder.name)), None)


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
    if name == "trainer_state.json" or name.startswith("events.out.tfevents"):
        return "metrics"
    head = _head(file) if name.endswith(".json") else b""
    if head.startswith(b"{") and b'"eval"' in head and b'"task"' in head:
        return "inspect"
    return _kind_of_rows(file) if _has_rows(file) else None


def _has_rows(file: Path) -> bool:
    name = file.name.removesuffix(".gz")
    return name.endswith((".jsonl", ".ndjson")) or (name.endswith(".json") and _head(file).startswith(b"["))


def _head(file: Path) -> bytes:
    with reading(file), open_stream(file) as stream:
        return stream.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()


def _kind_of_rows(file: Path) -> str | None:
    for _, row in islice(rows(file, []), FIRST_ROWS):
        if isinstance(row.get("messages"), list | str | dict):
            return "messages"
        if is_trace(row) or (first(row, "prompt") is not None and isinstance(first(row, "completion"), str | list)):
            if _step_folder(file):
                return "prime-rl"
            of_verl = {"input", "output"} <= set(row) or file.stem.partition(".")[0].isdigit()
            return "verl" if of_verl and not is_trace(row) else "verifiers"
        texts = any(isinstance(value, list) or (isinstance(value, str) and len(value) > 100) for value in row.values())
        if not texts and any(canonical(name) for name, value in _metrics_of(row).items() if value is not None):
            return "metrics"
    return None


def _unknown(file: Path) -> str | None:
    """Return a line about a file with data that is not understood, None for files that are no data."""
    if file.suffix == ".wandb":
        return f"{file.name}: not read; write the rows of wandb.Api().run(PATH).scan_history() as JSON lines"
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


def rows(file: Path, notes: list[str]) -> Iterator[tuple[str, Row]]:
    """Yield (place, object) of a file of JSON lines or a JSON list. Appends a note about what is not an object."""
    broken = []
    try:
        with reading(file), open_stream(file) as stream:
            whole = file.name.removesuffix(".gz").endswith(".json")
            values: Iterable[Any] = (
                parse_json(stream.read().removeprefix(BYTE_ORDER_MARK), file, list) if whole else map(_row, stream)
            )
            for number, row in enumerate(values, 1):
                if isinstance(row, dict):
                    yield f"{file.name}:{number}", row
                elif row is not BLANK:
                    broken.append(number)
    except DataError as error:
        notes.append(_short(error, file))
    if broken:
        left_out = f"{counted(len(broken), 'line')} without a JSON object, first line {broken[0]}"
        notes.append(f"{file.name}: left out: {left_out}")


def _row(line: bytes) -> Any:
    """Return the value of a line of JSON, None for any other line."""
    try:
        text = line.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "replace")
        return parse_json(text, "line") if text.strip() else BLANK
    except DataError:
        return None


def _short(error: DataError, file: Path) -> str:
    return str(error).replace(str(file), file.name, 1)


def import_rollouts(source: Source, runs_dir: Path, run_id: str, notes: list[str]) -> Path:
    """Write the rollouts of a source as a run and return its folder. Appends notes about rows that are left out.

    Rollouts of files with lines are named after their place, such as `6.jsonl:31`.
    """
    known: dict[str, Callable[..., Path]] = {
        "trl": partial(importers.import_trl, reward="sum"),
        "inspect": partial(importers.import_inspect, scorer="first"),
    }
    if source.kind not in known:
        return write_run(_rollouts(source, notes), source.folder, runs_dir, run_id, source.kind)
    place = source.folder if len(source.files) > 1 else source.files[0]
    run = known[source.kind](place, runs_dir, run_id=run_id)
    parts = read_footer(run / REWARDS_FILE).schema.names[1:] if (run / REWARDS_FILE).exists() else []
    if len(parts) > 1 and source.kind == "inspect":
        notes.append(f"{source.folder.name}: the reward is the first score of {', '.join(parts)}")
    return run


def _rollouts(source: Source, notes: list[str]) -> Iterator[Row]:
    read, left_out, other = list[Row](), list[str](), dict[str, None]()
    for file in source.files:
        if source.kind == "prime-rl" and (file.name.startswith("eval") or "eval" in file.parts[-3:-1]):
            notes.append(f"{file.name}: evaluations of prime-rl are not read")
            continue
        for place, row in rows(file, notes):
            try:
                read += list(converted(row, place, step_number(_step(row, file), place, "step")))
                unread = [name for name, own in row.items() if name not in USED and not is_number(own)]
                other |= dict.fromkeys(() if is_trace(row) else unread)
            except UserError as error:
                left_out.append(str(error))
    if left_out:
        names = list(dict.fromkeys(file.name for file in source.files))
        place = names[0] if len(names) == 1 else source.folder.name
        notes.append(f"{place}: left out: {counted(len(left_out), 'row')}, the first one: {left_out[0]}")
    if other:
        notes.append(f"{counted(len(other), 'column')} of the rollouts not read: {', '.join(list(other)[:6])}")
    # A group that no two rollouts of a step share is the id of the rollout. A text is no identity: pictures can have one question.
    groups = Counter((row["step"], row.get("group")) for row in read)
    if any(group is None for _, group in groups) or max(groups.values(), default=0) < 2:
        read = [row | {"group": None} for row in read]
    else:
        read = [row | {"problem_id": row["problem_id"] or digest(f"{row['question']} {row['truth']}")} for row in read]
    # An id that no two rows share is that of the rollout, not of the problem.
    ids = [str(row["row_id"]) for row in read if row.get("row_id") is not None]
    if len(ids) == len(read) and (len(set(ids)) < len(ids) or len({row["question"] for row in read}) == len(ids)):
        for row, own in zip(read, ids, strict=True):
            row["problem_id"] = row["problem_id"] or own
    yield from read


def _step(row: Row, file: Path) -> Any:
    step = first(row, "step")
    return number_in_name(_step_folder(file) or file) if step is None else step


def metric_lines(file: Path, notes: list[str]) -> Iterator[tuple[int, Values]]:
    """Yield (step, {name: value}) of a file with metrics. Values that are no numbers are None; lines without a step are left out."""
    try:
        for step, values in _metric_lines(file, notes):
            if (number := number_of(step)) is not None and 0 <= number < 2**31 and number == int(number):
                yield int(number), {name: value if is_number(value) else None for name, value in values.items()}
    except DataError as error:
        notes.append(_short(error, file))


def _metric_lines(file: Path, notes: list[str]) -> Iterator[tuple[Any, Values]]:
    if file.name == "trainer_state.json":
        lines = read_json(file, dict).get("log_history")
        if not isinstance(lines, list):
            raise DataError(f"{file}: no log_history can be read")
        yield from ((line.get("step"), _metrics_of(line)) for line in lines if isinstance(line, dict))
    elif file.name.startswith("events.out.tfevents"):
        yield from _tensorboard_scalars(file)
    else:
        numbered = False
        for number, (_, row) in enumerate(rows(file, notes), 1):
            step = first(row, "step")
            numbered |= step is None
            yield number if step is None else step, _metrics_of(row)
        if numbered:
            notes.append(f"{file.name}: rows without a step were numbered")


def _tensorboard_scalars(file: Path) -> Iterator[tuple[int, Values]]:
    """Yield (step, {tag: value}) of each event with scalars. A torn record ends the file."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    except ImportError:
        raise DataError(f"{file}: TensorBoard events require tensorboard: {install_hint('rl')}") from None
    with reading(file, errors=(DecodeError,)):
        for event in LegacyEventFileLoader(str(file)).Load():
            if found := {one.tag: one.simple_value for one in event.summary.value if one.HasField("simple_value")}:
                yield event.step, found


def _metrics_of(row: Row) -> Values:
    """Return the metrics of a line: those in `data`, as verl writes them, or all; nested ones under names with slashes. A null is None."""
    found: Values = {}
    for name, value in (row["data"] if isinstance(row.get("data"), dict) else row).items():
        if isinstance(value, dict):
            found |= {f"{name}/{inner}": own for inner, own in value.items() if is_number(own)}
        elif value is None or is_number(value):
            found[name] = value
        elif isinstance(value, str):
            with suppress(ValueError):
                found[name] = float(value)
    return found
