"""The interactive job board: a table, the selected job, and buttons."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from rstar_lab.errors import UserError
from rstar_lab.jobs.job import Job, attach
from rstar_lab.visible_text import escaped

if TYPE_CHECKING:
    from rstar_lab.jobs.board import BoardRow, JobBoard

LOG_LINES = 30


class BoardWidget:
    """Widgets of a JobBoard. All of them can be used with the keyboard."""

    def __init__(self, board: "JobBoard", inspect: Callable[[Path], Any] | None):
        self.board, self._inspect = board, inspect
        self.table = widgets.HTML()
        self.selection = widgets.Dropdown(description="Job", layout=widgets.Layout(width="28em"))
        self.message = widgets.HTML()
        self.output = widgets.Output()
        self.buttons = {
            name: widgets.Button(description=name, tooltip=tooltip)
            for name, tooltip in (
                ("Logs", f"the last {LOG_LINES} lines"),
                ("Stop", "end the job and all its processes"),
                ("Resume", "submit the same recipe again; it continues the run"),
                ("Inspect", "open the rollouts of the job's run"),
            )
        }
        self.buttons["Logs"].on_click(lambda _: self._act(self._logs))
        self.buttons["Stop"].on_click(lambda _: self._act(lambda job: f"{job.id}: {job.stop()}"))
        self.buttons["Resume"].on_click(lambda _: self._act(lambda job: f"{job.id} continues as {job.resume().id}"))
        self.buttons["Inspect"].on_click(lambda _: self._act(self._open))
        self.selection.observe(lambda _: self._enable(), "value")
        self._status: dict[str, str] = {}
        self.root = widgets.VBox(
            [self.table, widgets.HBox([self.selection, *self.buttons.values()]), self.message, self.output]
        )

    def show(self, rows: "list[BoardRow]") -> None:
        """Show these rows. The selection stays."""
        table = self.board.to_html(rows)
        if table != self.table.value:
            self.table.value = table
        self._status = {row.id: row.status for row in rows}
        ids = tuple(self._status)
        if ids != tuple(self.selection.options):
            selected = self.selection.value
            self.selection.options = ids
            self.selection.value = selected if selected in ids else (ids[0] if ids else None)
        self._enable()

    def _enable(self) -> None:
        status = self._status.get(self.selection.value, "")
        self.buttons["Logs"].disabled = not status
        self.buttons["Stop"].disabled = status not in ("running", "queued", "unknown")
        self.buttons["Resume"].disabled = status not in ("failed", "stopped", "finished")
        self.buttons["Inspect"].disabled = not status or self._inspect is None

    def _act(self, action: Callable[[Job], str]) -> None:
        try:
            self.message.value = action(attach(self.selection.value, runs_dir=self.board.runs_dir))
        except UserError as error:
            self.message.value = f"<b>{escaped(error)}</b>"
        self.board.refresh()

    def _logs(self, job: Job) -> str:
        return f"<pre>{escaped(job.logs(LOG_LINES)) or 'no output yet'}</pre>"

    def _open(self, job: Job) -> str:
        if job.run_dir is None:
            raise UserError(f"job {job.id} has no run yet")
        assert self._inspect is not None
        self.output.clear_output()
        with self.output:
            from IPython.display import display

            display(self._inspect(job.run_dir))
        return ""
