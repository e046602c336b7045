"""A table of all jobs in a notebook, with their progress and buttons: `JobBoard()`."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.jobs.job import CLASSES, Job, attach, backend_named, job_row, list_jobs
from rstar_lab.jobs.progress import last_metrics, parse_event, progress
from rstar_lab.runs.reader import find_runs_dir
from rstar_lab.untrusted.text import Html, duration, html, joined, visible

EVERY_S = 3.0
LOG_LINES = 30
LINE_SHOWN = 80  # the table shows this many characters of the last line of a log
LINE_LENGTH = 300  # characters that are shown of a line of a log
ENDED = ("finished", "failed", "stopped")


STYLE = Path(__file__).with_name("board.css").read_text(encoding="utf-8")
EMPTY = "No jobs yet: `rstar-lab jobs submit tiny_fast` starts one."
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
        shares = ("" if share is None else f"{share:.3f}" for share in (self.reward, self.error_rate))
        left = "" if self.left_s is None else duration(self.left_s)
        return [self.id, self.status, self.where, self.phase, step, *shares, left, self.line]


def render_table(rows: list[BoardRow]) -> Html:
    """Return the rows as an HTML table that needs no script."""
    if not rows:
        return html("<p>{}</p>", EMPTY)
    head = joined(html("<th>{}</th>", column) for column in COLUMNS)
    lines = []
    for row in rows:
        name, status, *cells, line = row.cells()
        shown = [name, html("<b class='rl-{0}'>{0}</b>", status), *cells]
        shown.append(html("<span title='{}'>{}</span>", line, line[:LINE_SHOWN]))
        lines.append(html("<tr>{}</tr>", joined(html("<td>{}</td>", cell) for cell in shown)))
    table = "<table class='rl-jobs'><thead><tr>{}</tr></thead><tbody>{}</tbody></table>"
    return joined([Html(f"<style>{STYLE}</style>"), html(table, head, joined(lines))])


class BoardWidget:
    """Widgets of a JobBoard. All of them can be used with the keyboard."""

    def __init__(self, board: "JobBoard", inspect: Callable[[Path], Any] | None):
        import ipywidgets as widgets  # of the extra `analysis`, which jobs do not require

        self.board, self._inspect = board, inspect
        self.table = widgets.HTML(layout={"overflow": "auto"})
        self.chosen = widgets.Dropdown(description="Job", layout={"width": "max-content"})  # that the buttons act on
        self.message = widgets.HTML()
        self.output = widgets.Output()
        self.buttons = {
            name: widgets.Button(description=name, tooltip=tooltip)
            for name, tooltip in (
                ("Logs", f"the last {LOG_LINES} lines"),
                ("Stop", "end the job and all its processes"),
                ("Inspect", "open the rollouts of the job's run"),
            )
        }
        self.buttons["Logs"].on_click(lambda _: self._act(self._logs))
        self.buttons["Stop"].on_click(lambda _: self._act(lambda job: f"{job.id}: {job.stop()}"))
        self.buttons["Inspect"].on_click(lambda _: self._act(self._open))
        self.chosen.observe(lambda _: self._select(), "value")
        self._status: dict[str, str] = {}
        self.root = widgets.VBox(
            [self.table, widgets.HBox([self.chosen, *self.buttons.values()]), self.message, self.output]
        )

    def show(self, rows: list[BoardRow]) -> None:
        """Show these rows. The selection stays."""
        self._status = {row.id: row.status for row in rows}
        options = [(visible(job_id), job_id) for job_id in self._status]
        if self.chosen.options != tuple(options):
            chosen = self.chosen.value
            self.chosen.options = options
            self.chosen.value = chosen if chosen in self._status else next(iter(self._status), None)
        self.table.value = render_table(rows)
        self._select()

    def _select(self) -> None:
        """Enable the buttons that fit the status of the selected job."""
        status = self._status.get(self.chosen.value, "")
        self.buttons["Logs"].disabled = not status
        self.buttons["Stop"].disabled = status not in ("running", "queued", "unknown")
        self.buttons["Inspect"].disabled = not status or self._inspect is None

    def _act(self, action: Callable[[Job], str]) -> None:
        try:
            text = action(attach(self.chosen.value, runs_dir=self.board.runs_dir))
        except UserError as error:
            text = str(error)
        self.message.value = html("<pre>{}</pre>", text)
        self.board.refresh()

    def _logs(self, job: Job) -> str:
        return "\n".join(map(_readable, job.logs(LOG_LINES).splitlines())) or "no output yet"

    def _open(self, job: Job) -> str:
        if job.run_dir is None:
            raise UserError(f"job {job.id} has no run yet")
        assert self._inspect is not None
        self.output.clear_output()
        with self.output:
            from IPython.display import display

            display(self._inspect(job.run_dir))
        return ""


class JobBoard:
    """All jobs of a runs folder: state, step, reward, tool errors, time left and last log line, updated every few seconds.

    All jobs on one host are read with one request over one connection. Jobs that have ended are read once. The buttons act on
    the job that is selected below the table. In a notebook executed without a browser, the board is a table.

    runs_dir: default: the folder that `find_runs_dir` finds. inspect: function that the button Inspect calls with the
    folder of a run, such as `rstar_lab.analysis.inspect`.
    """

    def __init__(
        self, runs_dir: str | Path = "", *, inspect: Callable[[Path], Any] | None = None, every_s: float = EVERY_S
    ):
        self.runs_dir, self.every_s, self._inspect = find_runs_dir(runs_dir), every_s, inspect
        self._ended: dict[str, BoardRow] = {}
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # (job, phase) -> time and step of the first read
        self._widget: Any = None
        self._task: asyncio.Task[None] | None = None

    def rows(self) -> list[BoardRow]:
        """Return one row per job, newest first. A host that does not answer gives status unknown."""
        jobs = list_jobs(self.runs_dir)[::-1]
        open_jobs = [job for job in jobs if job.id not in self._ended]
        answers = self._ask_backends([job for job in open_jobs if job.problem is None])
        rows = {job.id: self._board_row(job, answers.get(job.id) or job_row(job)) for job in open_jobs}
        self._ended |= {job_id: row for job_id, row in rows.items() if row.status in ENDED}
        return [rows.get(job.id) or self._ended[job.id] for job in jobs]

    def to_html(self) -> str:
        """Return the board as an HTML table."""
        return render_table(self.rows())

    def refresh(self) -> None:
        """Update the displayed board once."""
        rows = self.rows()
        if self._widget is not None:
            self._widget.show(rows)

    def _ask_backends(self, jobs: list[Job]) -> dict[str, dict[str, Any]]:
        """Return the rows of the jobs whose backend reads several jobs with one request."""
        answers: dict[str, dict[str, Any]] = {}
        for name in {job.spec.backend for job in jobs} & CLASSES.keys():
            answers |= backend_named(name).rows([job.spec for job in jobs if job.spec.backend == name])
        for job in jobs:
            if answers.get(job.id, {}).get("status") in ENDED:
                answers[job.id]["status"] = str(job.status_or_unknown())  # copies the rest of the log and exit.json
        return answers

    def _board_row(self, job: Job, row: dict[str, Any]) -> BoardRow:
        event = row.get("progress")  # known to a backend that reads several jobs
        if event is None:
            event = {"line": row["error"]} if job.problem else progress(job.folder.log)
        if row["status"] in ENDED and "reward" not in event and job.run_dir is not None:
            last = last_metrics(job.run_dir) or {}  # the phases after training report no reward
            event = event | {"reward": last.get("reward"), "error_rate": last.get("error_rate")}
        where = job.spec.backend
        with contextlib.suppress(UserError):  # the job can only be listed
            where = job.backend.place(job.spec)
        phase, done, total = event.get("event", ""), event.get("done"), event.get("total")
        return BoardRow(
            job.id, row["status"], where, phase, done, total, event.get("reward"), event.get("error_rate"),
            self._left_s(job.id, event) if row["status"] == "running" else None, event.get("line") or "",
        )  # fmt: skip

    def _left_s(self, job_id: str, event: dict[str, Any]) -> float | None:
        done, total = event.get("done"), event.get("total")
        if done is None or not total:
            return None
        now = time.monotonic()
        first_at, first_done = self._seen.setdefault((job_id, event["event"]), (now, done))
        if done > first_done:
            return (now - first_at) / (done - first_done) * (total - done)
        return event["step_s"] * (total - done) if "step_s" in event else None

    def _ipython_display_(self) -> None:
        from IPython.display import display

        rows = self.rows()
        self._widget = BoardWidget(self, self._inspect)
        self._widget.show(rows)
        bundle = self._widget.root._repr_mimebundle_() or {}
        # Without the widget's model, for example in a saved file, the table is shown.
        text = "\n".join("  ".join(filter(None, row.cells())) for row in rows)
        display({**bundle, "text/html": render_table(rows), "text/plain": text}, raw=True)
        with contextlib.suppress(RuntimeError):  # without an event loop the board is not updated
            self._task = self._task or asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self.every_s)
            rows = await asyncio.to_thread(self.rows)
            self._widget.show(rows)

    def close(self) -> None:
        """Stop the updates."""
        if self._task is not None:
            self._task.cancel()
            self._task = None


def _readable(line: str) -> str:
    """Return a line of a log as text: of a JSON object, its values that are not lists or objects."""
    event = parse_event(line)
    if event is not None:
        line = " · ".join(f"{key} {value}" for key, value in event.items() if not isinstance(value, list | dict))
    return line if len(line) <= LINE_LENGTH else f"{line[:LINE_LENGTH]}…"
