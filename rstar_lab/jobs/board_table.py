"""The table of a job board, as HTML and as text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rstar_lab.visible_text import escaped

COLOURS = {"running": "#1565c0", "queued": "#8d6e00", "finished": "#2e7d32", "failed": "#c62828", "stopped": "#6d6d6d"}
COLUMNS = ("job", "status", "where", "phase", "step", "reward", "tool errors", "left", "last line")


@dataclass(frozen=True)
class BoardRow:
    """One row of the board. left_s: seconds left, estimated from the steps that this board has seen, or from the
    duration of the last step."""

    id: str
    status: str
    where: str
    phase: str = ""
    done: int | None = None
    total: int | None = None
    reward: float | None = None
    error_rate: float | None = None
    left_s: float | None = None
    line: str = ""

    def cells(self) -> list[str]:
        step = "" if self.done is None else f"{self.done}/{self.total}" if self.total else str(self.done)
        return [
            self.id, self.status, self.where, self.phase, step, _share(self.reward), _share(self.error_rate),
            _duration(self.left_s), self.line,
        ]  # fmt: skip


class Board(Protocol):
    """What the widget needs of a board: its folder of runs, and a function that reads the jobs again."""

    runs_dir: Path

    def refresh(self) -> None: ...


def render_table(rows: list[BoardRow]) -> str:
    """Return the rows as an HTML table."""
    if not rows:
        return "<p>No jobs yet: <code>rstar-lab jobs submit tiny_fast</code> starts one.</p>"
    head = "".join(f"<th style='text-align:left'>{column}</th>" for column in COLUMNS)
    lines = []
    for row in rows:
        cells = [escaped(text) for text in row.cells()]
        cells[1] = f"<b style='color:{COLOURS.get(row.status, 'inherit')}'>{cells[1]}</b>"
        cells[-1] = f"<span title='{cells[-1]}'>{cells[-1][:80]}</span>"
        lines.append("<tr>" + "".join(f"<td style='text-align:left'>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def to_text(rows: list[BoardRow]) -> str:
    return "\n".join("  ".join(cell for cell in row.cells() if cell) for row in rows)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    hours, minutes = int(seconds // 3600), int(seconds % 3600 // 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
