"""Sources of problems: the training sets of the paper and evaluation sets, by name, and files.

The command line and the recipe key `file` accept

    dapo                          a name in SOURCES, downloaded from the Hugging Face hub (extra `hub`)
    open-r1/DAPO-Math-17k-Processed       the same set by its hub name
    openai/gsm8k:train            another split of such a set
    ORG/NAME[/CONFIG][:SPLIT]     any set on the hub, with our column names or those of --fields. Default split: train
    dapo=data/dapo.parquet        a local file with the columns of that set
    problems.jsonl                a file with our column names, or with those of --fields
    problems.jsonl:question=problem,answer=solution         a file with its own column names
"""

import functools
import hashlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import first_line, install_hint
from rstar_lab.rl.data import code_problems
from rstar_lab.rl.problems import FIELDS, FILE_SUFFIXES, Problem, ProblemError, read_problem, read_rows
from rstar_lab.untrusted.files import reading

_HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:/([\w.-]+))?(?::([\w.\[\]%:+-]+))?")
_LOCAL = ("data", "models", "runs", "out")  # first parts of paths that are files, never names of organisations


@dataclass(frozen=True)
class Source:
    """A data set: its name on the Hugging Face hub and its column names.

    columns: the columns that are needed of a large data set with several rows per problem; empty: all. keep: returns whether to use a
    row; None: use all rows. convert: returns the fields of a problem, or raises ValueError. evaluation: a benchmark, whose problems
    `data prepare` does not filter.
    """

    name: str
    fields: Mapping[str, str]
    hub: str | None = None
    config: str | None = None
    split: str = "train"
    columns: tuple[str, ...] = ()
    keep: Callable[[Mapping[str, Any]], bool] | None = None
    convert: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    evaluation: bool = False


def _from_aops(row: Mapping[str, Any]) -> bool:
    return "aops" in str(row.get("problem_source", "aops")) and row.get("problem_type") == "has_answer_extracted"


_PROBLEM = {"question": "problem", "answer": "answer"}
SOURCES = {
    source.name: source
    for source in (
        # Training: rStar2-Agent, section 4.2.
        Source(
            "dapo", {"question": "prompt", "answer": "solution", "problem_id": "extra_info.index"},
            hub="open-r1/DAPO-Math-17k-Processed", config="en",
        ),
        Source(
            "openmathreasoning", {"question": "problem", "answer": "expected_answer"},
            hub="nvidia/OpenMathReasoning", split="cot", keep=_from_aops,
            columns=("problem", "expected_answer", "problem_type", "problem_source"),
        ),
        Source("project_euler", _PROBLEM),  # bring a file: the site forbids copies of its problems
        # Evaluation.
        Source("aime24", {**_PROBLEM, "problem_id": "id"}, hub="HuggingFaceH4/aime_2024", evaluation=True),
        Source("aime25", {**_PROBLEM, "problem_id": "id"}, hub="math-ai/aime25", split="test", evaluation=True),
        Source("hmmt25", {**_PROBLEM, "problem_id": "problem_idx"}, hub="MathArena/hmmt_feb_2025", evaluation=True),
        Source(
            "math500", {**_PROBLEM, "problem_id": "unique_id"}, hub="HuggingFaceH4/MATH-500", split="test", evaluation=True
        ),
        Source("gsm8k", {}, hub="openai/gsm8k", config="main", split="test"),
        Source("olympiadbench", {"answer": "final_answer", "problem_id": "id"}),
        Source("minerva_math", {"question": "problem", "answer": "solution"}),
        Source("college_math", {}),
        # Programs with hidden test cases, see `code_problems`. APPS and TACO are not tables on the hub: they need files.
        Source("apps", {}, convert=code_problems.apps),
        Source("taco", {}, convert=code_problems.apps),
        Source("code_contests", {}, hub="deepmind/code_contests", convert=code_problems.code_contests),
        Source("codeforces", {}, hub="open-r1/codeforces", convert=code_problems.codeforces),
        Source("synthetic_code", {}, hub="PrimeIntellect/verifiable-coding-problems", convert=code_problems.synthetic),
        Source("rstar_coder", {}, convert=code_problems.rstar_coder),
        Source("livecodebench", {}, convert=code_problems.livecodebench, evaluation=True),
    )
}  # fmt: skip


@dataclass(slots=True)
class Candidate:
    """A problem before filtering.

    where: file or hub name, and row number. source: name of its source in the report. answers: answers of a strong
    model, if known.
    """

    problem: Problem
    where: str
    source: str
    answers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ParsedSource:
    """A source that the command line names, and where to read it. path: file; None: the Hugging Face hub."""

    source: Source
    path: Path | None


def parse_fields(text: str | None) -> dict[str, str]:
    """Parse `question=problem,answer=final_answer` into {our field name: column name of the file}.

    Raises ProblemError for other syntax or an unknown field.
    """
    mapping = {}
    for pair in filter(None, (part.strip() for part in (text or "").split(","))):
        ours, equals, theirs = (part.strip() for part in pair.partition("="))
        if not equals or not theirs or ours not in FIELDS:
            raise ProblemError(f"--fields: {pair!r} is not FIELD=COLUMN; FIELD is one of {', '.join(FIELDS)}")
        mapping[ours] = theirs
    return mapping


def parse_source(text: str, fields: Mapping[str, str] | None = None) -> ParsedSource:
    """Return the source that an argument names (see the module docstring).

    fields: column names of files whose argument names none. Raises ProblemError for an unknown name.
    """
    name, equals, path = text.partition("=")
    if equals and name in SOURCES:
        return ParsedSource(SOURCES[name], Path(path))
    if source := _named_source(text, fields):
        if source.hub is None:
            raise ProblemError(f"{text} cannot be read from the hub: give a file, {text}=FILE")
        return ParsedSource(source, None)
    path, colon, mapping = text.rpartition(":")
    if not (colon and "=" in mapping) or Path(text).is_file():
        path, mapping = text, ""
    elif source := _named_source(path, parse_fields(mapping)):
        return ParsedSource(source, None)
    if not Path(path).suffix:
        problem = "a folder" if Path(path).is_dir() else "no such file"
        raise ProblemError(f"{text}: {problem}; give a file, ORG/NAME on the hub, or one of {', '.join(SOURCES)}")
    name = Path(path.removesuffix(".gz")).stem
    return ParsedSource(Source(name, parse_fields(mapping) or dict(fields or {})), Path(path))


def _named_source(text: str, fields: Mapping[str, str] | None) -> Source | None:
    """Return the data set that a text names, or None if it is the path of a file."""
    if text in SOURCES:
        return SOURCES[text]
    match = _HUB_NAME.fullmatch(text)
    if match is None or Path(text).exists() or text.split("/")[0] in _LOCAL or Path(text).suffix in FILE_SUFFIXES:
        return None
    hub, config, split = match.groups()
    known = next((source for source in SOURCES.values() if source.hub == hub), None)
    if known is not None and config in (None, known.config):
        return replace(known, split=split or known.split)
    return Source(hub.partition("/")[2], dict(fields or {}), hub=hub, config=config, split=split or "train")


def is_problem_set(source: str | Path) -> bool:
    """Return whether a recipe's `file` is an existing file, or the name of a data set, which may not be reachable."""
    return Path(source).is_file() or _named_source(str(source), None) is not None


def load_problems(
    source: str | Path, *, fields: Mapping[str, str] | None = None, answers: bool = True, limit: int | None = None
) -> list[Problem]:
    """Return the problems of a file, or of a data set by name, which is read from the hub once in a process.

    Args:
        source: File or name (see the module docstring). Columns of a file that are not fields of a problem are ignored; data files
            for verl need no `fields`.
        fields: Our field name -> column name, such as {"question": "problem"}; dots address nested objects
            ("reward_model.ground_truth").
        answers: Whether each problem that names no environment must have an answer.
        limit: Read only the first `limit` problems.

    Returns:
        The problems. Default id: file name and row. Default source: file name. A solution is reduced to its `final_answer`; a list of
        answers is joined by commas.

    Raises:
        ProblemError: The set cannot be read, has no problems, or has an invalid row, which is named with its field.
    """
    named = _named_source(str(source), fields) is not None
    return [*(_load_once if named else _load)(str(source), tuple((fields or {}).items()), answers, limit)]


def _load(source: str, fields: tuple[tuple[str, str], ...], answers: bool, limit: int | None) -> list[Problem]:
    parsed = parse_source(source, dict(fields))
    found: dict[str, Candidate] = {}
    for candidate in itertools.islice(read_source(parsed, answers=answers), limit):
        name = candidate.problem.problem_id
        if (before := found.setdefault(name, candidate)) is not candidate:
            field, row = parsed.source.fields.get("problem_id", "problem_id"), before.where.rpartition(" ")[2]
            raise ProblemError(f"{candidate.where}, field {field!r}: {name!r} is also the id of row {row}")
    if not found:
        raise ProblemError(f"{source}: no problems")
    return [candidate.problem for candidate in found.values()]


_load_once = functools.cache(_load)


def read_source(
    parsed: ParsedSource, on_bad_row: Callable[[str], None] | None = None, *, answers: bool = True
) -> Iterator[Candidate]:
    """Yield the problems of a source.

    answers: whether a row that names no environment must have an answer. on_bad_row: called with the message of each invalid
    row; None: the first invalid row raises ProblemError.
    """
    source = parsed.source
    public = any(source.fields is known.fields for known in SOURCES.values())  # copies of these can lack the ids
    for number, row in _rows(parsed):
        where = f"{parsed.path or source.hub} row {number}"
        if source.keep and isinstance(row, Mapping) and not source.keep(row):
            continue
        fields = {
            ours: theirs
            for ours, theirs in source.fields.items()
            if ours != "problem_id" or not public or (isinstance(row, Mapping) and theirs.split(".")[0] in row)
        }
        try:
            problem = read_problem(
                _converted(source, row, where), where=where, fields=fields, default_id=f"{source.name}-{number}",
                default_source=source.name, answers=answers,
            )  # fmt: skip
        except ProblemError as error:
            if on_bad_row is None and source.convert is None:
                raise
            if on_bad_row is None:  # public sets with hidden tests have rows without usable tests
                raise ProblemError(f"{error}; `data prepare --drop-bad-rows` leaves such rows out") from None
            on_bad_row(str(error))
            continue
        sampled = row.get("answers") or [] if isinstance(row, Mapping) else []
        yield Candidate(problem, where, source.name, [str(answer) for answer in sampled if answer is not None])


def _converted(source: Source, row: Any, where: str) -> Any:
    """Return the row as the fields of a problem, if it has hidden tests of a known format."""
    if not isinstance(row, Mapping):
        return row
    convert = source.convert or (None if source.fields else code_problems.converter_of(row))
    with reading(where, error=ProblemError):
        return convert(row) if convert else row


def _rows(parsed: ParsedSource) -> Iterator[tuple[int, Any]]:
    if parsed.path:
        yield from read_rows(parsed.path)
        return
    source = parsed.source
    assert source.hub is not None
    with _hub_errors(source):
        if source.columns:
            assert source.keep is not None
            yield from enumerate(different_rows(source.hub, source.split, source.columns, source.keep), 1)
        else:
            yield from enumerate(_hub_rows(source), 1)


@contextmanager
def _hub_errors(source: Source) -> Iterator[None]:
    """Convert every error of the Hub's libraries to ProblemError."""
    try:
        yield
    except Exception as error:  # datasets also raises the errors of huggingface_hub and of its HTTP library
        missing = isinstance(error, ImportError)
        reason = f"it requires datasets: {install_hint('hub')}" if missing else first_line(error)[:200]
        raise ProblemError(
            f"{source.hub}: could not be read from the hub ({reason}); the same command continues; or give {source.name}=FILE"
        ) from None


def _hub_rows(source: Source) -> Iterator[Any]:
    """Yield the rows of a split. Without a connection they come from the cache at once; datasets would repeat each request for 25 s."""
    from datasets import config, load_dataset
    from huggingface_hub import HfApi, constants, errors

    unreachable = None
    try:
        HfApi().dataset_info(str(source.hub), timeout=10)
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled):
        pass  # it answers, or requests are disabled
    except Exception as error:  # of the HTTP library
        unreachable = error
    modules: list[Any] = [config, constants] if unreachable else []
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield from load_dataset(source.hub, source.config, split=source.split)
    except Exception:
        if unreachable is None:
            raise
        raise ProblemError(
            f"no connection to {constants.ENDPOINT}, {first_line(unreachable)[:200]}, and its cache has no copy"
        ) from None
    finally:
        for module in modules:
            module.HF_HUB_OFFLINE = False


def different_rows(
    hub: str, split: str, columns: Sequence[str], keep: Callable[[Mapping[str, Any]], bool]
) -> Iterator[dict[str, Any]]:
    """Yield the different rows of the Parquet files of a split, with these columns only, for which `keep` is true.

    Each file is read over HTTP, only in its columns. Its rows are stored under HF_HOME before the next one is read, so that the same
    call continues after an interruption. Progress is written to stderr. Raises OSError and the errors of huggingface_hub if the Hub
    cannot be read, and ProblemError if the split has no Parquet files.
    """
    import pyarrow.parquet as pq
    from huggingface_hub import HfApi, HfFileSystem, constants
    from tqdm import tqdm

    from rstar_lab.runs.files import atomic_write

    info = HfApi().dataset_info(hub, timeout=30)
    name = re.compile(rf"(?:.*/)?{re.escape(split)}(?:-\d+-of-\d+)?\.parquet")
    files = sorted(entry.rfilename for entry in info.siblings or () if name.fullmatch(entry.rfilename))
    if not files:
        raise ProblemError(f"{hub}: the split {split} has no Parquet files")
    digest = hashlib.sha256(repr((info.sha, split, *columns)).encode()).hexdigest()[:16]
    folder = Path(constants.HF_HOME) / "rstar_lab" / hub.replace("/", "--") / digest
    folder.mkdir(parents=True, exist_ok=True)
    remote = HfFileSystem()
    for file in tqdm(files, desc=hub, unit="file", mininterval=1.0 if sys.stderr.isatty() else 60.0):
        part = folder / file.replace("/", "--")
        if part.exists():
            continue
        with remote.open(f"datasets/{hub}@{info.sha}/{file}", "rb") as opened:
            table = pq.read_table(opened, columns=list(columns), use_threads=False)
        with atomic_write(part) as out:
            pq.write_table(table.group_by(list(columns), use_threads=False).aggregate([]), out)
    seen: set[tuple[Any, ...]] = set()
    for file in files:
        for row in pq.read_table(folder / file.replace("/", "--")).select(list(columns)).to_pylist():
            if keep(row) and (key := tuple(row.values())) not in seen:
                seen.add(key)
                yield row
