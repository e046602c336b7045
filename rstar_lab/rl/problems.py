"""Problems for training and evaluation, and how problem files are read and written."""

import csv
import difflib
import io
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rstar_lab.common.errors import exit_with_message
from rstar_lab.untrusted.files import (
    MAX_JSON_BYTES,
    DataError,
    json_lines,
    long_integers,
    open_stream,
    parse_json,
    parse_value,
    read_text,
    reading,
)
from rstar_lab.untrusted.parquet import parquet_batches
from rstar_lab.untrusted.text import counted
from rstar_lab.verify.gold import final_answer

log = logging.getLogger(__name__)


class ProblemError(DataError):
    """A problem file cannot be read. The message names file, row and field."""


class Problem(BaseModel):
    """One problem: a question and its true answer.

    answer: the true answer; may be empty if the environment does not need one. difficulty: as
    the data source defines it; if measured here, the share of rollouts that failed. info: free metadata, JSON values by
    name, which tools, rewards and environments can read.
    environment: name of an entry of the recipe key `rl.environments`; empty: the task of `rl.tools` and `rl.reward`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    problem_id: str = Field(min_length=1)
    question: str = Field(min_length=1)
    answer: str = ""
    source: str = ""
    difficulty: float | None = Field(default=None, allow_inf_nan=False)
    info: dict[str, Any] = Field(default_factory=dict)
    environment: str = ""

    def as_row(self) -> dict[str, Any]:
        """Return the fields as JSON values, without `info` and `environment` if they are empty."""
        empty = {name for name in _OPTIONAL if not getattr(self, name)}
        return self.model_dump(mode="json", exclude=empty)

    def task(self) -> str:
        """Return what tells problems with the same question apart: an environment and its metadata as JSON, or "" without environment."""
        known = self.model_dump_json(include={"environment", "info"}, exclude={"info": {"tests"}})
        return known if self.environment else ""


FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".gz")
FIELDS = tuple(Problem.model_fields)
_OPTIONAL = ("info", "environment")  # not written if empty
VERL_FIELDS = {"question": "prompt", "answer": "reward_model.ground_truth"}  # columns of data files for verl


def _plain(value: Any, field: str, named: bool) -> Any:
    """Return the value of a field in the form in which it is stored; None if there is none.

    Numbers become text, except for the difficulty. A list of answers is joined by commas. Of messages, the question is the last
    one of the user, and the answer the last one of the assistant. Metadata that is JSON text is parsed. A value of another type is
    left out if its column has our name by chance. named: whether the user has named the column.
    """
    if field in _ROLES and isinstance(value, str) and value.lstrip().startswith("[{"):
        with suppress(DataError):  # messages as JSON text or, in CSV, as a Python literal
            items = parse_value(value, field)
            roles = [isinstance(item, Mapping) and {"role", "from"} & item.keys() for item in items]
            value = items if all(roles) else value
    if field == "info":
        with suppress(DataError):  # the type of the value is checked below
            value = parse_value(value, "info") if isinstance(value, str) else value
        value = value or None
    elif isinstance(value, list | tuple):
        if field in _ROLES and value and all(isinstance(item, Mapping) for item in value):
            value = _last_message(value, _ROLES[field])
        elif field == "answer" and value and all(isinstance(item, str | int | float) for item in value):
            value = ", ".join(map(str, value))
    elif isinstance(value, float) and math.isnan(value):
        return None  # a missing value of a numeric column
    elif field not in ("difficulty", "environment") and isinstance(value, int | float) and not isinstance(value, bool):
        whole = field == "answer" and abs(value) < 2**53 and value == int(value)  # a column with nulls has floats
        value = value if isinstance(value, float) and math.isinf(value) else str(int(value) if whole else value)
    elif field == "difficulty" and isinstance(value, str):
        value = float(value) if _NUMBER.fullmatch(value.strip()) else value
    return value if named or field not in _TYPES or isinstance(value, _TYPES[field]) else None


_NUMBER = re.compile(r"[+-]?\d{1,15}(?:\.\d{1,15})?")
# Columns of these names can have another meaning in a source.
_TYPES: dict[str, Any] = {
    "difficulty": int | float, "problem_id": str, "source": str, "info": Mapping, "environment": str,
}  # fmt: skip
_ROLES = {"question": ("user", "human"), "answer": ("assistant", "gpt")}


def _last_message(messages: Sequence[Mapping[str, Any]], roles: Sequence[str]) -> Any:
    texts = [
        message.get("content", message.get("value"))
        for message in messages
        if message.get("role", message.get("from")) in roles
    ]
    return texts[-1] if texts else None


def _look_up(row: Mapping[str, Any], name: str) -> Any:
    """Return row[name], or the value at a dotted name in nested objects; None if there is none."""
    value: Any = row
    for part in (name,) if name in row else name.split("."):
        with suppress(DataError):  # an object as JSON text or, in CSV, as a Python literal
            value = parse_value(value, name) if isinstance(value, str) and value.lstrip().startswith("{") else value
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def read_problem(
    row: Any, *, where: str, fields: Mapping[str, str], default_id: str, default_source: str, answers: bool = True
) -> Problem:
    """Return a row as a Problem. Raises ProblemError that names the field.

    where: file and row, for the error. fields: our field name -> column name. answers: whether a row that names no
    environment and has no hidden tests (`info.tests`) must have an answer.
    """
    if not isinstance(row, Mapping):
        raise ProblemError(f"{where}: expected an object with named fields, got {type(row).__name__}")
    if "question" not in row and not fields.keys() & VERL_FIELDS and _look_up(row, VERL_FIELDS["answer"]) is not None:
        fields = {**fields, **VERL_FIELDS}
    if isinstance(row, dict) and None in row:
        raise ProblemError(f"{where}: it has more values than the header has names; quote a text that contains a comma")
    with reading(where, error=ProblemError), long_integers():
        found = {ours: _plain(_look_up(row, fields.get(ours, ours)), ours, ours in fields) for ours in FIELDS}
    has_tests = isinstance(found["info"], Mapping) and bool(found["info"].get("tests"))
    answers = answers and not has_tests and not found["environment"]
    values: dict[str, Any] = {"problem_id": default_id, "source": default_source}
    for ours, value in found.items():
        theirs = fields.get(ours, ours)
        if isinstance(value, float) and math.isinf(value):
            raise ProblemError(f"{where}, field {theirs!r}: {value} is not a finite number")
        if value is None or (isinstance(value, str) and not value.strip()):
            if ours == "question" or (answers if ours == "answer" else ours in fields):
                raise ProblemError(
                    f"{where}, field {theirs!r}: {'missing' if value is None else 'empty'}; the row has "
                    f"{', '.join(map(str, row))} (map names with --fields {ours}=NAME)"
                )
            continue
        values[ours] = final_answer(value) if ours == "answer" and isinstance(value, str) else value
    try:
        return Problem(**values)
    except ValidationError as error:
        detail = error.errors()[0]
        ours = str(detail["loc"][0])
        raise ProblemError(f"{where}, field {fields.get(ours, ours)!r}: {detail['msg']}") from None


def read_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield (row number from 1, row) of a .jsonl, .json (a list of objects), .csv (with a header) or .parquet file.

    .jsonl, .csv and .parquet files are read incrementally. All but .parquet can be gzipped. Raises ProblemError that names file and row.
    """
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*")], n=1, cutoff=0.75)
        hint = f"did you mean {path.parent / near[0]}?" if near else "`rstar-lab data prepare` makes files of problems"
        raise ProblemError(f"{path}: no such file; {hint} (docs/data.md)")
    match Path(path.name.removesuffix(".gz")).suffix:
        case ".jsonl":
            yield from json_lines(path)
        case ".json":
            text = read_text(path, MAX_JSON_BYTES).removeprefix("\ufeff")
            lines = text.split("\n", 2)
            several = len(lines) > 1 and lines[0].strip().startswith("{") and lines[1].strip().startswith("{")
            renamed = path.name.replace(".json", ".jsonl")
            rows = parse_json(text, f"{path}: it has JSON lines: rename it to {renamed}" if several else path)
            if not isinstance(rows, list):
                raise ProblemError(f"{path}: not a list of objects")
            yield from enumerate(rows, 1)
        case ".csv":
            csv.field_size_limit(MAX_JSON_BYTES)
            with reading(path, error=ProblemError), open_stream(path) as stream:
                table = csv.DictReader(io.TextIOWrapper(stream, "utf-8-sig", newline=""))
                names = [name for name in table.fieldnames or () if name]
                if repeated := next((name for name in names if names.count(name) > 1), None):
                    raise ProblemError(f"{path}: the header names the column {repeated!r} twice; rename one of them")
                number = 0
                for number, row in enumerate(table, 1):
                    yield number, row
                if not number:
                    raise ProblemError(f"{path}: a '.csv' file starts with a header, and this one has no row below it")
        case ".parquet" if path.suffix == ".parquet":
            yield from enumerate((row for batch in parquet_batches(path) for row in batch.to_pylist()), 1)
        case _:
            raise ProblemError(f"{path}: problem files end in .jsonl, .json, .csv (or these with .gz) or .parquet")


def without_copies(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems of an evaluation without copies, and warn about them.

    A copy has the question, answer and metadata of an earlier problem, and no id of its own: its id is its place in the
    file. Files of verl repeat each problem once per sample; as problems of their own, copies would make intervals too narrow.
    """
    seen: set[str] = set()
    distinct = []
    for number, problem in enumerate(problems, 1):
        content = problem.model_dump_json(exclude={"problem_id", "source", "difficulty"})
        if content not in seen or not problem.problem_id.endswith(f"-{number}"):
            distinct.append(problem)
        seen.add(content)
    if copies := len(problems) - len(distinct):
        log.warning(
            "%d of %d problems are copies of an earlier one and are left out; set the number of samples instead",
            copies, len(problems),
        )  # fmt: skip
    return distinct


def write_problems(path: str | Path, problems: Iterable[Problem]) -> None:
    """Write problems to a .jsonl or .parquet file, which is replaced atomically.

    Args:
        path: The file; its suffix chooses the format.
        problems: The problems.

    Raises:
        ProblemError: For another suffix.
        RunStoreError: If the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ProblemError(f"{path}: problems are written as .jsonl or .parquet, not {path.suffix!r}")
    from rstar_lab.runs.files import atomic_write  # requires pyarrow, which the extra `sandbox` does not install

    if path.suffix == ".jsonl":
        with atomic_write(path) as file, long_integers():
            for problem in problems:
                file.write((json.dumps(problem.as_row(), ensure_ascii=False) + "\n").encode())
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [problem.as_row() for problem in problems]
        with long_integers():
            for row in rows:
                row |= {"info": json.dumps(row["info"], ensure_ascii=False)} if "info" in row else {}
        names = [name for name in FIELDS if name not in _OPTIONAL or any(name in row for row in rows)]
        types = [(name, pa.float64() if name == "difficulty" else pa.string()) for name in names]
        with atomic_write(path) as file:
            pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(types)), file)


def write_problem_file(module: str, problems_of: Callable[[str], Sequence[Problem]]) -> None:
    """Write problems to a file. This is the main function of `python -m MODULE MODULE:NAME PROBLEMS.jsonl`.

    problems_of: returns the problems of `module:name`. For wrong arguments or a UserError, exits with a message.
    """
    if len(sys.argv) != 3:
        sys.exit(f"usage: python -m {module} MODULE:NAME PROBLEMS.jsonl")
    target, path = sys.argv[1:]
    with exit_with_message():
        problems = problems_of(target)
        write_problems(path, problems)
    print(f"{counted(len(problems), 'problem')} written to {path}")
