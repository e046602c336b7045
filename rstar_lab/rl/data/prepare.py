"""Prepare a problem set for RL: read the sources, filter problems, check labels, store the difficulty, and write a report."""

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat
from typing_extensions import TypedDict

from rstar_lab.common.errors import UserError
from rstar_lab.rl.data import filters
from rstar_lab.rl.data.filters import Drops
from rstar_lab.rl.data.similarity import Corpus, Texts
from rstar_lab.rl.data.sources import Candidate, ParsedSource, parse_source, read_source
from rstar_lab.rl.problems import ProblemError, read_rows, write_problems
from rstar_lab.runs.files import write_json
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.tables import UNUSABLE
from rstar_lab.untrusted.files import check_type

MAX_ANSWERS, MIN_AGREE = 16, 2  # so many of the answers of a strong model must agree with a label
SIMILARITY = 0.8  # threshold of near-duplicates
EXAMPLES = 5  # dropped problems per filter in the report, spread evenly
EXCERPT = 240  # characters of a question or answer


@dataclass(frozen=True)
class DroppedProblem:
    """A problem that a filter dropped. where: source and row number. why: the reason."""

    problem_id: str
    where: str
    why: str
    answer: str
    question: str


@dataclass(frozen=True)
class FilterCount:
    """Number of problems before a filter and dropped by it. note: added to the rule, such as how many could not be checked."""

    name: str
    rule: str
    before: int
    dropped: int
    note: str = ""
    examples: list[DroppedProblem] = field(default_factory=list)


@dataclass
class Report:
    """What was read, dropped and written. Paths are written as the user gave them. against: the evaluation sets."""

    settings: dict[str, Any]
    sources: list[dict[str, Any]] = field(default_factory=list)
    against: list[dict[str, Any]] = field(default_factory=list)
    bad_rows: list[str] = field(default_factory=list)
    filters: list[FilterCount] = field(default_factory=list)
    kept: int = 0
    difficulty: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)


def report_path(out: Path) -> Path:
    """Return the file of the report of `out`, beside it: train.parquet.json of train.parquet."""
    return out.with_name(f"{out.name}.json")


def prepare(
    sources: Sequence[str],
    out: Path,
    *,
    against: Sequence[str] = (),
    fields: Mapping[str, str] | None = None,
    any_answer: bool = False,
    ngram: int = 8,
    answers: Path | None = None,
    difficulty: Path | None = None,
    drop_bad_rows: bool = False,
    on_filter: Callable[[FilterCount], None] | None = None,
) -> Report:
    """Write the problems of `sources` that pass every filter to `out`, and the report beside it (`report_path`).

    sources, against: see `sources.parse_source`. Problems of the evaluation sets `against` are removed. fields: column names of
    plain files. any_answer: keep answers that are not integers. Only problems with an answer are checked, and only if a source is
    not a benchmark: if all sources are (math500, aime24, ...), every problem is kept, so that results stay comparable.
    ngram: number of equal consecutive words that counts as contamination. answers: run of a strong model, or table of its answers
    (problem_id or question, answers). difficulty: run folder, or table of problem_id and reward, from rollouts of the current
    policy; the difficulty of a problem is the share of rollouts that failed. drop_bad_rows: list invalid rows in the report instead
    of raising an error. on_filter: called after each filter.
    Raises UserError for input that cannot be read, and if no problem is left.
    """
    chosen, held_out = ([parse_source(text, fields) for text in texts] for texts in (sources, against))
    for parsed in (*chosen, *held_out):
        if parsed.path is not None and parsed.path.exists() and parsed.path.resolve() == out.resolve():
            raise UserError(f"data prepare --out {out}: this file is also a source; write to another file")
    report = Report(
        settings={
            "any_answer": any_answer, "similarity": SIMILARITY, "ngram": ngram, "min_agree": MIN_AGREE,
            "answers": str(answers) if answers else None, "difficulty": str(difficulty) if difficulty else None,
            "drop_bad_rows": drop_bad_rows,
        }
    )  # fmt: skip
    on_bad_row = report.bad_rows.append if drop_bad_rows else None
    candidates, repeated = _read_sources(chosen, report.sources, on_bad_row)
    evaluation, owners = _read_evaluation(held_out, report.against, on_bad_row)
    _add_answers(candidates, answers)
    pass_rates = read_pass_rates(difficulty) if difficulty else {}
    filtering = _Filtering(report, candidates, on_filter)
    rule = "equal question, answer, metadata and environment; their sampled answers are collected"
    filtering.report(FilterCount("repeated row", rule, len(candidates) + repeated, repeated))

    benchmarks = all(parsed.source.evaluation for parsed in chosen)
    if not any_answer and not benchmarks:
        filtering.drop("answer", "an integer", filters.not_integer(filtering.candidates))
    corpus = Corpus()
    filtering.texts = corpus.encode(candidate.problem.question for candidate in filtering.candidates)
    if not benchmarks:
        drops = filters.conflicts(filtering.candidates, filtering.texts)
        filtering.drop("conflict", "questions with different answers", drops)
        drops = filters.duplicates(filtering.candidates, filtering.texts)
        filtering.drop("duplicate", "the same words, numbers and signs", drops)
        drops = filters.similar_questions(filtering.candidates, filtering.texts, corpus, SIMILARITY)
        rule = f"Jaccard similarity of word pairs at least {SIMILARITY:g}, numbers, signs, variables alike"
        filtering.drop("near-duplicate", rule, drops)
    drops, overlaps = filters.contamination(filtering.texts, corpus, corpus.encode(evaluation), owners, ngram)
    filtering.drop("contamination", f"{ngram} words in a row with an evaluation set", drops)
    for entry in report.against:
        entry["overlaps"] = overlaps.get(entry["name"], 0)
    drops, unchecked = filters.wrong_labels(filtering.candidates, MIN_AGREE, MAX_ANSWERS)
    note = f"unchecked, with fewer than {MIN_AGREE} answers: {unchecked:,}" if unchecked else ""
    filtering.drop("label", f"at least {MIN_AGREE} of {MAX_ANSWERS} answers of a strong model agree", drops, note)
    if not filtering.candidates:
        dropped = ", ".join(f"{count.name} {count.dropped:,}" for count in report.filters if count.dropped)
        raise UserError(f"no problem is left of {len(candidates):,}; dropped: {dropped}")
    _write(report, filtering.candidates, pass_rates, Path(out))
    return report


class _Filtering:
    """The remaining candidates and their encoded texts. Each filter is recorded in the report."""

    def __init__(self, record: Report, candidates: list[Candidate], on_filter: Callable[[FilterCount], None] | None):
        self.record, self.candidates, self.on_filter = record, candidates, on_filter
        self.texts: Texts | None = None

    def drop(self, name: str, rule: str, drops: Drops, note: str = "") -> None:
        places = sorted(drops)
        shown = places[:: max(1, -(-len(places) // EXAMPLES))]
        examples = []
        for place in shown:
            problem, where = self.candidates[place].problem, self.candidates[place].where
            question = problem.question if len(problem.question) <= EXCERPT else problem.question[:EXCERPT] + " …"
            examples.append(DroppedProblem(problem.problem_id, where, drops[place], problem.answer[:EXCERPT], question))
        self.report(FilterCount(name, rule, len(self.candidates), len(drops), note, examples))
        if drops:
            self.candidates = [one for place, one in enumerate(self.candidates) if place not in drops]
            if self.texts is not None:
                self.texts = filters.keep_texts(self.texts, drops)

    def report(self, count: FilterCount) -> None:
        self.record.filters.append(count)
        if self.on_filter:
            self.on_filter(count)


def _read_sources(
    sources: Sequence[ParsedSource], entries: list[dict], on_bad_row: Callable[[str], None] | None
) -> tuple[list[Candidate], int]:
    """Return the problems of all sources without exact copies, and the number of copies. Adds one entry per source to `entries`."""
    seen: dict[tuple[str, str, str, int], Candidate] = {}
    ids: set[str] = set()
    repeated = 0
    for parsed in sources:
        before, rows, entry = len(seen), 0, _entry(parsed, entries)
        for candidate in read_source(parsed, on_bad_row):
            rows += 1
            candidate.source = entry["name"]
            problem = candidate.problem
            info = hash(problem.model_dump_json(include={"info"}))  # hidden tests can have megabytes
            known = seen.setdefault((problem.question, problem.answer, problem.environment, info), candidate)
            if known is not candidate:
                repeated += 1
                known.answers += candidate.answers[: MAX_ANSWERS - len(known.answers)]
                continue
            name = problem.problem_id
            if name in ids:
                name = _unused(f"{parsed.source.name}/{name}", ids)
                candidate.problem = problem.model_copy(update={"problem_id": name})
            ids.add(name)
        if not rows:
            raise ProblemError(f"{parsed.path or parsed.source.hub}: no problems")
        entries.append(entry | {"rows": rows, "different": len(seen) - before})
    return list(seen.values()), repeated


def _unused(name: str, used: Collection[str]) -> str:
    """Return a name, with the first number that makes it unused if it is used."""
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([name], numbered) if candidate not in used)


def _entry(parsed: ParsedSource, entries: Sequence[Mapping[str, Any]], rows: int = 0) -> dict:
    """Return the entry of a source in the report. Two files `train.jsonl` have different names in it."""
    return {
        "name": _unused(parsed.source.name, [entry["name"] for entry in entries]),
        "from": str(parsed.path or parsed.source.hub),
        "rows": rows,
        "sha256": _file_hash(parsed.path) if parsed.path and parsed.path.is_file() else None,
    }


def _read_evaluation(
    against: Sequence[ParsedSource], entries: list[dict], on_bad_row: Callable[[str], None] | None
) -> tuple[list[str], list[str]]:
    """Return all evaluation questions, and the name of the set of each. Adds one entry per set to `entries`."""
    questions: list[str] = []
    owners: list[str] = []
    for parsed in against:
        evaluation = [candidate.problem.question for candidate in read_source(parsed, on_bad_row)]
        questions += evaluation
        entries.append(_entry(parsed, entries, len(evaluation)))
        owners += [entries[-1]["name"]] * len(evaluation)
    return questions, owners


def _rows_of(path: Path, columns: list[str]) -> Iterable[tuple[int, Any]]:
    """Return the rows of a table, or the rollouts of a run with these columns."""
    return enumerate(RunReader(path).read("trajectories", columns).to_pylist(), 1) if path.is_dir() else read_rows(path)


def _add_answers(candidates: Sequence[Candidate], path: Path | None) -> None:
    if path is None:
        return
    known: dict[tuple[str, str], list[str]] = defaultdict(list)
    for number, row in _rows_of(path, ["problem_id", "answer"]):
        values = row.get("answers", row.get("answer")) if isinstance(row, Mapping) else None
        key = row.get("problem_id", row.get("question")) if isinstance(row, Mapping) else None
        if values is None and key is not None and "answer" in row:
            continue  # a rollout without an answer
        if values is None or key is None:
            raise ProblemError(f"{path} row {number}: expected problem_id (or question) and answers (a list)")
        sampled = values if isinstance(values, list) else [values]
        answers = [str(answer) for answer in sampled if answer is not None]  # null: a rollout without an answer
        known["problem_id" if "problem_id" in row else "question", str(key)] += answers
    for candidate in candidates:
        for name in ("problem_id", "question"):
            candidate.answers += known[name, getattr(candidate.problem, name)]


def read_pass_rates(path: Path) -> dict[str, float]:
    """Return {problem_id: share of rollouts with a positive reward} of a run folder, or of a table with problem_id and reward.

    Rollouts of a run without a valid reward are left out. Raises UserError that names file and row.
    """
    rewards: dict[str, list[bool]] = defaultdict(list)
    for number, row in _rows_of(path, ["problem_id", "reward", "stop_reason"]):
        if path.is_dir() and (row["reward"] is None or row["stop_reason"] in UNUSABLE):
            continue
        rollout = check_type(row, _Rollout, f"{path} row {number}: expected problem_id and reward")
        rewards[str(rollout["problem_id"])].append(rollout["reward"] > 0)
    return {name: sum(solved) / len(solved) for name, solved in rewards.items()}


class _Rollout(TypedDict):
    problem_id: str | int
    reward: FiniteFloat


def _write(report: Report, candidates: list[Candidate], pass_rates: Mapping[str, float], out: Path) -> None:
    """Write the problems and the report."""
    problems = []
    for candidate in candidates:
        problem = candidate.problem
        changes: dict[str, object] = {}
        if (integer := filters.plain_integer(problem.answer)) is not None:
            changes["answer"] = integer
        if problem.problem_id in pass_rates:
            changes["difficulty"] = 1.0 - pass_rates[problem.problem_id]
        problems.append(problem.model_copy(update=changes))
    write_problems(out, problems)
    report.kept = len(problems)
    by_source = Counter(candidate.source for candidate in candidates)
    for entry in report.sources:
        entry["kept"] = by_source[entry["name"]]
    if pass_rates:
        shares = [1.0 - pass_rates[problem.problem_id] for problem in problems if problem.problem_id in pass_rates]
        report.difficulty = {
            "measured": len(shares),
            "not measured": len(problems) - len(shares),
            "mean": round(sum(shares) / len(shares), 4) if shares else None,
            "never solved": sum(share == 1 for share in shares),
            "always solved": sum(share == 0 for share in shares),
        }
    report.output = {"file": str(out), "sha256": _file_hash(out), "problems": len(problems)}
    write_json(report_path(out), report)


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
