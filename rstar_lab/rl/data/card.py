"""The data card of a prepared problem set: its sources, how many problems each filter dropped, examples and settings."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rstar_lab.runs.files import atomic_write
from rstar_lab.untrusted.text import counted

EXAMPLES = 5  # per filter, spread evenly over the dropped problems
EXCERPT = 240  # characters of a question or answer
KEY = "rstar_lab"  # of our entries in the YAML at the top of a card


def file_hash(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def card_path(out: Path) -> Path:
    """Return the file of the card of `out`: NAME.card.md beside it, as train.parquet.card.md."""
    return out.with_name(f"{out.name}.card.md")


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
        """Write the card in the format of the Hugging Face Hub: all numbers as YAML under `rstar_lab`, then tables."""
        from huggingface_hub import DatasetCardData

        name = Path(self.output["file"]).name
        data = DatasetCardData(pretty_name=name, **{KEY: asdict(self)})  # type: ignore[arg-type]
        filters = [
            {"filter": one.name, "rule": f"{one.rule} ({one.note})" if one.note else one.rule, "before": f"{one.before:,}",
             "dropped": f"{one.dropped:,}", "after": f"{one.before - one.dropped:,}"}
            for one in self.filters
        ]  # fmt: skip
        parts = [
            f"---\n{data.to_yaml()}\n---\n\n# {name}: {counted(self.kept, 'problem')}",
            "## Sources", _table([entry | {"kept": self.kept_by_source.get(entry["name"], 0)} for entry in self.sources]),
            "## Filters, in order", _table(filters),
            "## Evaluation sets whose problems were removed",
            _table(self.against) or "None. Overlaps with evaluation sets were not checked.",
        ]  # fmt: skip
        for one in self.filters:
            if one.examples:
                parts += [f"## Dropped by {one.name}, examples", _table([asdict(example) for example in one.examples])]
        if self.bad_rows:
            parts += [f"## Invalid rows: {len(self.bad_rows):,}", "\n".join(f"- {row}" for row in self.bad_rows[:50])]
        with atomic_write(path) as file:
            file.write(("\n\n".join(parts) + "\n").encode())


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows with equal keys as a Markdown table; empty without rows."""
    if not rows:
        return ""
    cells = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    texts = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in row] for row in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in texts)
