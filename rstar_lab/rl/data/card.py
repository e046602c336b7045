"""The data card of a prepared problem set: its sources, how many problems each filter dropped, examples and settings."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rstar_lab.runs.files import atomic_write
from rstar_lab.untrusted.text import counted

EXAMPLES = 5  # per filter, spread evenly over the dropped problems
EXCERPT = 240  # characters of a question or answer


def file_hash(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_hash(text: str) -> str:
    """Return the first 16 hex digits of the sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def card_path(out: Path) -> Path:
    """Return the file of the card of `out`: STEM.card.json, or NAME.card.json if the former is the card of another file."""
    short = out.with_name(f"{out.stem}.card.json")
    try:
        owner = json.loads(short.read_text(encoding="utf-8"))["output"]["file"]
    except FileNotFoundError:
        return short
    except (OSError, ValueError, LookupError, TypeError):
        owner = ""  # not a card
    return short if Path(owner).name == out.name else out.with_name(f"{out.name}.card.json")


@dataclass(frozen=True)
class DroppedProblem:
    """A problem that a filter dropped. where: source and row number. why: the reason."""

    problem_id: str
    where: str
    question: str
    answer: str
    question_hash: str
    why: str


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
class Card:
    """The data card. Paths are written as the user gave them. against: the evaluation sets."""

    settings: dict[str, Any]
    sources: list[dict[str, Any]] = field(default_factory=list)
    against: list[dict[str, Any]] = field(default_factory=list)
    bad_rows: list[str] = field(default_factory=list)
    filters: list[FilterCount] = field(default_factory=list)
    kept: int = 0
    kept_by_source: dict[str, int] = field(default_factory=dict)
    difficulty: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the card to `path` as JSON, and beside it as Markdown. Each file is replaced atomically."""
        for target, text in [
            (path, json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n"),
            (path.with_suffix(".md"), self.markdown()),
        ]:
            with atomic_write(target) as file:
                file.write(text.encode())

    def markdown(self) -> str:
        """Return the card as Markdown."""
        lines = [f"# {Path(self.output['file']).name}: {counted(self.kept, 'problem')}", "", "## Sources", ""]
        lines += _table(
            ["source", "read from", "problems", "kept", "sha256"],
            [
                [
                    source["name"],
                    source["from"],
                    f"{source['rows']:,}",
                    f"{self.kept_by_source.get(source['name'], 0):,}",
                    _short(source["sha256"]),
                ]
                for source in self.sources
            ],
        )
        lines += ["", "## Filters, in order", ""]
        lines += _table(
            ["filter", "rule", "before", "dropped", "after"],
            [
                [
                    count.name,
                    count.rule + (f" ({count.note})" if count.note else ""),
                    f"{count.before:,}",
                    f"{count.dropped:,}",
                    f"{count.before - count.dropped:,}",
                ]
                for count in self.filters
            ],
        )
        lines += ["", "## Evaluation sets whose problems were removed", ""]
        lines += _table(
            ["set", "read from", "problems", "overlaps found", "sha256"],
            [
                [
                    against["name"],
                    against["from"],
                    f"{against['rows']:,}",
                    f"{against['overlaps']:,}",
                    _short(against["sha256"]),
                ]
                for against in self.against
            ],
        )
        if not self.against:
            lines += ["None. Overlaps with evaluation sets were not checked."]
        if self.difficulty:
            lines += ["", "## Difficulty", "", *(f"- {name}: {value}" for name, value in self.difficulty.items())]
        if self.bad_rows:
            lines += ["", f"## Invalid rows: {len(self.bad_rows):,}", "", *(f"- {row}" for row in self.bad_rows[:50])]
        lines += ["", "## Examples of dropped problems"]
        for count in self.filters:
            if count.examples:
                lines += ["", f"### {count.name}", ""]
                lines += _table(
                    ["problem", "why", "answer", "question", "hash"],
                    [
                        [example.where, example.why, example.answer, example.question, example.question_hash]
                        for example in count.examples
                    ],
                )
        settings = [f"- {name}: {value}" for name, value in self.settings.items()]
        lines += [
            "",
            "## Settings",
            "",
            *settings,
            "",
            f"Output: {self.output['file']}, sha256 {self.output['sha256']}",
            "",
        ]
        return "\n".join(lines)


def _short(digest: str | None) -> str:
    return f"`{digest[:12]}`" if digest else "hub"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *cells]]
