"""The data card: what went in, what each filter took out and why, what came out. As JSON for programs, as Markdown
for people."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rstar_lab.runs.files import atomic_write

EXAMPLES = 5  # a filter, evenly over what it dropped
EXCERPT = 240


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_hash(text: str) -> str:
    """The first 16 digits of the sha256 of a text: enough to find a problem again."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Example:
    """A problem that a filter dropped, and why."""

    problem_id: str
    where: str
    question: str
    answer: str
    question_hash: str
    why: str


@dataclass(frozen=True)
class FilterCount:
    """What a filter did. note: what the count alone does not say (checks that had nothing to check with, for one)."""

    name: str
    rule: str
    before: int
    dropped: int
    note: str = ""
    examples: list[Example] = field(default_factory=list)


@dataclass
class Card:
    """Everything there is to say about one prepared set. Paths are as they were given."""

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
        """PATH and, beside it, the same as .md; each file whole or not at all."""
        for target, text in [
            (path, json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n"),
            (path.with_suffix(".md"), self.markdown()),
        ]:
            with atomic_write(target) as file:
                file.write(text.encode())

    def markdown(self) -> str:
        lines = [f"# {Path(self.output['file']).name}: {self.kept:,} problems", "", "## Sources", ""]
        lines += _table(
            ["source", "read from", "problems", "kept", "sha256"],
            [
                [
                    one["name"],
                    one["from"],
                    f"{one['rows']:,}",
                    f"{self.kept_by_source.get(one['name'], 0):,}",
                    _short(one["sha256"]),
                ]
                for one in self.sources
            ],
        )
        lines += ["", "## Filters, in their order", ""]
        lines += _table(
            ["filter", "rule", "before", "dropped", "after"],
            [
                [
                    one.name,
                    one.rule + (f" ({one.note})" if one.note else ""),
                    f"{one.before:,}",
                    f"{one.dropped:,}",
                    f"{one.before - one.dropped:,}",
                ]
                for one in self.filters
            ],
        )
        lines += ["", "## Evaluation sets this one was cleaned against", ""]
        lines += _table(
            ["set", "read from", "problems", "overlaps found", "sha256"],
            [
                [one["name"], one["from"], f"{one['rows']:,}", f"{one['overlaps']:,}", _short(one["sha256"])]
                for one in self.against
            ],
        )
        if not self.against:
            lines += ["None: nothing is known about overlaps with evaluation sets."]
        if self.difficulty:
            lines += ["", "## Difficulty", "", *(f"- {name}: {value}" for name, value in self.difficulty.items())]
        if self.bad_rows:
            lines += ["", f"## Bad rows: {len(self.bad_rows):,}", "", *(f"- {row}" for row in self.bad_rows[:50])]
        lines += ["", "## Examples of what was dropped"]
        for one in self.filters:
            if one.examples:
                lines += ["", f"### {one.name}", ""]
                lines += _table(
                    ["problem", "why", "answer", "question", "hash"],
                    [
                        [example.where, example.why, example.answer, example.question, example.question_hash]
                        for example in one.examples
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
