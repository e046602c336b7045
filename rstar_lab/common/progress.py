"""Progress of long work: a progress bar on a terminal, one line per step elsewhere, JSON lines for programs."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from rstar_lab.common.errors import as_called
from rstar_lab.untrusted.text import printable


def plain(value: object, style: str = "") -> Text:
    """Return a value for rich as it is: a name, an answer or an error of a run or model is no markup and controls no terminal."""
    return Text(printable(value), style)


class Reporter:
    """Prints messages and progress. as_json: only JSON lines, for programs."""

    def __init__(self, as_json: bool = False, console: Console | None = None):
        self.as_json = as_json
        self.console = console or Console(highlight=False, emoji=False)

    def print_line(self, text: str) -> None:
        """Print a line, unless the output is for programs."""
        if not self.as_json:
            self.console.print(plain(as_called(text)), soft_wrap=True)

    def emit(self, event: str, **fields: Any) -> None:
        """Print an event as a JSON line, if the output is for programs."""
        if self.as_json:
            print(json.dumps({"event": event} | fields, default=str), flush=True)

    @contextmanager
    def work(self, name: str, total: int | None = None) -> Iterator["Work"]:
        """Show the progress of a task until the block ends. total: number of its parts, if known."""
        if self.as_json or not self.console.is_terminal:
            yield Work(self, name, total, None)
            return
        columns = [TextColumn("{task.description:10}", markup=False), BarColumn(16), MofNCompleteColumn()]
        # On a narrow terminal the note is cut, not the numbers.
        note = TextColumn(
            "{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
        )
        columns += [TimeElapsedColumn(), TimeRemainingColumn(), note]
        with Progress(*columns, console=self.console, expand=True) as progress:
            yield Work(self, name, total, progress)


class Work:
    """The progress of one task: a bar on a terminal, lines elsewhere."""

    def __init__(self, reporter: Reporter, name: str, total: int | None, progress: Progress | None):
        self.reporter, self.name, self.total, self.progress = reporter, name, total, progress
        self.started = self.printed_at = time.monotonic()
        # (seconds, parts) of the first update. Parts of an earlier attempt and the start (compiling on a GPU) say nothing about the rest.
        self._first: tuple[float, int] | None = None
        if progress:
            self.task = progress.add_task(printable(name), total=total, note="")

    def update(self, done: int, note: str = "", *, every_s: float = 0.0, **fields: Any) -> None:
        """Set the number of finished parts. Without a terminal, at most one line is printed every `every_s` seconds.

        note: text after the numbers. fields: metrics for the JSON line.
        """
        if self.progress:
            self.progress.update(self.task, completed=done, total=self.total, note=printable(note))
            return
        now = time.monotonic()
        self._first = self._first or (now, done)
        if done != self.total and now - self.printed_at < every_s:
            return
        self.printed_at = now
        self.reporter.emit(self.name, done=done, total=self.total, **fields)
        first_at, first = self._first
        left = (now - first_at) / (done - first) * (self.total - done) if self.total and done > first else None
        remaining = f", {left:.0f} s left" if left else ""
        self.reporter.print_line(f"{self.name} {done}/{self.total} {note} ({now - self.started:.0f} s{remaining})")
