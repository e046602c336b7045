"""An overview of all runs in a notebook: `overview(runs_dir)`."""

import asyncio
import textwrap
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import traitlets
from IPython.display import display

from rstar_lab.analysis.alerts import alerts_of_steps, step_metrics, summarize_alerts
from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.analysis.inspector.inspector import Inspector
from rstar_lab.analysis.inspector.link import LinkedFigure
from rstar_lab.analysis.inspector.palette import join_modules, styles
from rstar_lab.analysis.inspector.widget import Bundle, Follower, NotebookWidget
from rstar_lab.analysis.line_panels import Panel, draw_panels
from rstar_lab.analysis.metrics import class_title, curves, get_metric, held_out_metrics, rollout_classes
from rstar_lab.analysis.runs import open_runs, recipe_changes, recipe_columns
from rstar_lab.analysis.tables import format_value
from rstar_lab.analysis.views import state_of
from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunReader
from rstar_lab.runs.errors import READ_ERRORS
from rstar_lab.runs.reader import find_runs_dir, run_folders
from rstar_lab.untrusted.text import Html, escaped, html, joined, visible

ROLLED_UP = ("pass1", "tool_error_rate_correct", "response_tokens", "reflection_tokens", "entropy")
SERIES = {
    "pass1": "pass@1", "tool_error_rate_correct": "tool errors in correct", "response_tokens": "length (tokens)",
    "reflection_tokens": "reflection words", "mismatch": "mismatch", "entropy": "entropy (nats)",
}  # fmt: skip
COLUMNS = ("run", "state", "step", "s/step", *SERIES.values(), "trained", "parent", "recipe", "alerts")
_POINTS, WIDTH, HEIGHT = 40, 80, 20  # size of a sparkline in pixels
_CHANGES = 60  # characters of the recipe keys in a cell
_SPEED_STEPS = 5  # the speed is the median over this number of latest steps
_UNDER_PARENT = ("evaluate", "fork")  # kinds of runs that are listed under the run that they belong to


@dataclass(frozen=True)
class OverviewRow:
    """One run of the overview.

    Attributes:
        step_s: Median seconds per step of the last steps.
        series: Values over steps by metric.
        classes: What became of the rollouts: number by class, see `rollout_classes`. They add up to `trajectories`.
        parent_run: Run that the model came from; empty if the run does not name it.
        model: Path of the model of an evaluation.
        recipe: Its keys, as in `recipe_columns`. changes: those that differ between the training runs of the overview.
        under: Run under which the row is listed: evaluations and forks follow the run that they belong to.
    """

    run_id: str
    state: str
    created: str = ""
    step: int | None = None
    trajectories: int = 0
    step_s: float | None = None
    parent: str = ""
    alerts: tuple[str, ...] = ()
    series: dict[str, list[float]] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)
    error: str = ""
    kind: str = ""
    parent_run: str = ""
    model: str = ""
    under: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    changes: str = ""

    def cells(self) -> list[dict[str, str]]:
        """Return the cells in the order of COLUMNS: text, and optionally title (shown on hover) and points of a line."""
        classes = "; ".join(f"{count:,} {class_title(name)}" for name, count in self.classes.items())
        started = f"{self.kind or 'run'}, started {self.created}" if self.created else self.error
        trained = self.classes.get("trained", 0) / max(1, sum(self.classes.values()))
        cells = [
            {"text": self.run_id, "title": started},
            {"text": self.state, "title": self.error},
            {"text": "" if self.step is None else str(self.step)},
            {"text": "" if self.step_s is None else f"{self.step_s:.3g}"},
            *(sparkline(name, self.series.get(name, [])) for name in SERIES),
            {"text": f"{trained:.0%}", "title": classes} if self.classes else {"text": ""},
            {"text": self.parent},
            {"text": textwrap.shorten(self.changes, _CHANGES, placeholder=" …"), "title": self.changes},
            {"text": str(len(self.alerts) or ""), "title": "; ".join(self.alerts)},
        ]
        shown: list[dict[str, str]] = [{name: visible(text) for name, text in cell.items()} for cell in cells]
        shown[0] |= {"under": self.under} if self.under else {}
        return shown


class OverviewRows:
    """Reads the rows of a folder of runs, or of one run. Unchanged runs come from memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._rows: dict[Path, tuple[tuple, OverviewRow]] = {}

    def read(self) -> list[OverviewRow]:
        """Return one row per run, newest first; evaluations and forks follow the run that they belong to.

        A damaged run has the state "unreadable" and its error.
        """
        folders = [self.root] if (self.root / "run.json").exists() else run_folders(self.root)
        states = {folder: _state(folder) for folder in folders}
        changed = [folder for folder in folders if self._rows.get(folder, (None,))[0] != states[folder]]
        for folder, row in _read_rows(changed).items():
            self._rows[folder] = (states[folder], row)
        rows = [self._rows[folder][1] for folder in folders]
        trained = [row for row in rows if row.kind == "train"]
        changes = recipe_changes(pd.DataFrame([row.recipe for row in trained]))
        texts = {row.run_id: text for row, text in zip(trained, changes, strict=True)}
        rows = [replace(row, changes=texts.get(row.run_id, "")) for row in rows]
        return _under_their_runs(sorted(rows, key=lambda row: (row.created, row.run_id), reverse=True))


def _under_their_runs(rows: list[OverviewRow]) -> list[OverviewRow]:
    """Move evaluations and forks below the run that they belong to, if it is one of the rows."""
    by_id = {row.run_id: row for row in rows}

    def owner(row: OverviewRow) -> str:
        above, seen = row, list[str]()
        while above.run_id not in seen:
            seen.append(above.run_id)
            names = [above.parent_run] if above.parent_run else reversed(Path(above.model).parts)
            found = [by_id[name] for name in names if name in by_id] if above.kind in _UNDER_PARENT else []
            if not found:
                return above.run_id
            above = found[0]
        return row.run_id  # runs that name each other

    below: dict[str, list[OverviewRow]] = {}
    for row in rows:
        above = owner(row)
        below.setdefault(above, []).append(row if above == row.run_id else replace(row, under=above))
    return [shown for row in rows for shown in sorted(below.get(row.run_id, ()), key=lambda shown: bool(shown.under))]


def _state(folder: Path) -> tuple:
    """Return a value that changes when a step is written and when the run starts or ends."""
    try:
        return state_of(folder), RunReader(folder).status
    except READ_ERRORS as error:
        return state_of(folder), str(error)


def _read_rows(folders: list[Path]) -> dict[Path, OverviewRow]:
    try:
        return _read_readable(folders) if folders else {}
    except READ_ERRORS as error:
        if len(folders) == 1:
            return {folders[0]: OverviewRow(folders[0].name, "unreadable", error=str(error) or type(error).__name__)}
        return {folder: row for path in folders for folder, row in _read_rows([path]).items()}


def _read_readable(folders: list[Path]) -> dict[Path, OverviewRow]:
    runs = open_runs(folders)
    frame = step_metrics(runs, ROLLED_UP, ["step_s"])
    frame = frame.astype({name: float for name in (*SERIES, "step_s")})
    by_run, alerts, classes = (
        dict(list(table.groupby("run_id")))
        for table in (frame, summarize_alerts(alerts_of_steps(frame)), rollout_classes(runs))
    )
    rows: dict[Path, OverviewRow] = {}
    for folder in folders:
        reader = RunReader(folder)
        info, part = reader.info, by_run.get(reader.run_id, frame.iloc[:0])
        values = {name: part[name].dropna().to_numpy() for name in (*SERIES, "step_s")}
        parent = info.get("parent") or {}
        ended = classes.get(reader.run_id)
        found = alerts[reader.run_id].itertuples() if reader.run_id in alerts else ()
        rows[folder] = OverviewRow(
            run_id=reader.run_id,
            state=reader.status,
            created=str(info.get("created") or ""),
            step=int(part.step.max()) if len(part) else None,
            trajectories=int(part.n.sum()),
            step_s=float(np.median(values["step_s"][-_SPEED_STEPS:])) if len(values["step_s"]) else None,
            kind=str(info.get("kind") or ""),
            recipe=recipe_columns(info["recipe"]),
            parent_run=str(parent.get("run") or ""),
            model=str((info.get("extra") or {}).get("model") or ""),
            parent=", step ".join(str(parent[key]) for key in ("run", "step") if parent.get(key) is not None),
            alerts=tuple(f"{alert.alert} from step {alert.step}: {alert.evidence}" for alert in found),
            series={name: values[name].tolist() for name in SERIES},
            classes=dict(zip(ended.rollout_class, ended.rollouts, strict=True)) if ended is not None else {},
        )
    return rows


def sparkline(name: str, values: list[float]) -> dict[str, str]:
    """Return a cell: the points of a line of the values over steps, and the last value as text; empty without values."""
    if not values:
        return {"text": ""}
    kept = np.asarray(values)[np.unique(np.linspace(0, len(values) - 1, _POINTS).round().astype(int))]
    low, high = kept.min(), kept.max()
    height = (kept - low) / (high - low) if high > low else np.full(len(kept), 0.5)
    x = np.linspace(1, WIDTH - 1, len(kept)) if len(kept) > 1 else np.array([WIDTH / 2])
    points = " ".join(f"{a:.0f},{HEIGHT - 2 - b:.0f}" for a, b in zip(x, height * (HEIGHT - 4), strict=True))
    percent = name != "mismatch" and get_metric(name).percent
    return {"text": format_value(values[-1], percent), "points": points}


def _cell_html(cell: dict[str, str]) -> Html:
    """Return a cell as HTML."""
    line: Html | str = ""
    if points := cell.get("points"):
        line = html(
            '<svg width="{0}" height="{1}" viewBox="0 0 {0} {1}" aria-hidden="true">'
            '<polyline points="{2}" fill="none" stroke="currentColor" stroke-width="1.3"/></svg>',
            WIDTH, HEIGHT, points,
        )  # fmt: skip
    style = "text-align:left" + (";padding-left:28px" if cell.get("under") else "")
    return html('<td style="{}" title="{}">{}{}</td>', style, cell.get("title", ""), line, cell["text"])


def render_overview(rows: list[OverviewRow]) -> Html:
    """Return the rows as an HTML table that needs no script."""
    if not rows:
        return Html("<p>No runs yet: <code>make demo</code> writes some.</p>")
    head = joined(html('<th scope="col" style="text-align:left">{}</th>', column) for column in COLUMNS)
    body = joined(html("<tr>{}</tr>", joined(map(_cell_html, row.cells()))) for row in rows)
    return html("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>", head, body)


class RunTable(NotebookWidget):
    """The table of runs with a check box per run. selected: run ids whose curves are shown."""

    _esm = join_modules("dom", "overview")
    _css = styles("overview")

    columns: traitlets.List[str] = traitlets.List(list(COLUMNS)).tag(sync=True)
    table_rows: traitlets.List[Any] = traitlets.List().tag(sync=True)  # pairs of run id and its cells
    selected: traitlets.List[str] = traitlets.List().tag(sync=True)

    def __init__(self, rows: list[OverviewRow], **state: Any) -> None:
        super().__init__(**state)
        self.set_rows(rows)

    def set_rows(self, rows: list[OverviewRow]) -> None:
        """Show these rows."""
        self.rows = rows
        self.table_rows = [[row.run_id, row.cells()] for row in rows]

    def static_bundle(self) -> Bundle:
        return {"text/html": render_overview(self.rows), "text/plain": "\n".join(row.run_id for row in self.rows)}

    def replacement(self) -> "RunTable":
        widget = RunTable(self.rows, selected=self.selected)
        traitlets.link((self, "selected"), (widget, "selected"))
        traitlets.dlink((self, "table_rows"), (widget, "table_rows"))
        return widget


class Overview(Follower):
    """All runs of a folder in a table, the curves of the selected runs, and an inspector of their rollouts.

    `selected` can be set from Python. Executed without a kernel, the table and the figure stay readable.
    """

    def __init__(self, root: Path, every_s: float, selected: list[str] | None) -> None:
        super().__init__(every_s)
        self.inspector: Inspector | None = None
        self._reader = OverviewRows(root)
        self.rows = self._reader.read()
        self.table = RunTable(self.rows, selected=self._first() if selected is None else selected)
        self.figure = LinkedFigure(_empty_figure(), None)
        self._draw()
        self.table.observe(lambda _: self._draw(), "selected")

    @property
    def selected(self) -> list[str]:
        """Ids of the runs whose curves are shown."""
        return self.table.selected

    @selected.setter
    def selected(self, run_ids: list[str]) -> None:
        self.table.selected = run_ids

    def to_html(self) -> Html:
        """Return the table as HTML."""
        return render_overview(self.rows)

    def _first(self) -> list[str]:
        """Return the newest run with a curve of rollouts, else one with rollouts (evaluations have one step), else one of SFT."""
        started = [row for row in self.rows if row.step is not None]
        started.sort(key=lambda row: (not row.trajectories, row.step == 1 and row.state != "running"))
        return [row.run_id for row in started[:1]]

    def refresh(self) -> None:
        """Read the runs that changed and update the display."""
        self._show(self._reader.read())

    def _show(self, rows: list[OverviewRow]) -> None:
        if rows == self.rows:
            return
        before = self._of_selected()
        follows = self.selected == self._first() and not any(row.kind == "train" and row.trajectories for row in before)
        self.rows = rows
        self.table.set_rows(rows)
        if follows:
            self.table.selected = self._first()  # the stages of a training, until RL
        if self._of_selected() != before:
            self._draw(new_store=False)

    def _of_selected(self) -> list[OverviewRow]:
        """Return the selected runs that have steps."""
        return [row for row in self.rows if row.run_id in self.selected and row.step is not None]

    def _draw(self, new_store: bool = True) -> None:
        """Draw the curves of the selected runs and list their rollouts. new_store: the selection changed."""
        try:
            self._draw_runs(self._of_selected(), new_store)
        except READ_ERRORS as error:
            self.figure.update_figure(_empty_figure(f"A selected run cannot be read: {error}"))

    def _draw_runs(self, rows: list[OverviewRow], new_store: bool) -> None:
        run_ids = [row.run_id for row in rows if row.trajectories]
        runs = open_runs(self._reader.root, run_ids=run_ids or [row.run_id for row in rows])
        if not run_ids:
            self.figure.update_figure(_losses(runs.steps()) if rows else _empty_figure())
            return
        frame = curves(runs, ROLLED_UP)
        names = [*(name for name in ROLLED_UP if frame[name].notna().any()), *held_out_metrics(runs)]
        self.figure.update_figure(plot_curves(runs, names) if names else _empty_figure())
        if self.inspector is None:
            self.inspector = Inspector(runs, label="selected runs")
            self.figure.inspector, self.figure.linked = self.inspector, True
        elif new_store:
            self.inspector.set_store(runs, "selected runs")
        else:
            self.inspector.refresh()

    async def update(self) -> None:
        with suppress(*READ_ERRORS):  # a run was moved or cut between two reads: the next update shows it
            self._show(await asyncio.to_thread(self._reader.read))

    def _ipython_display_(self, **_: Any) -> None:
        display(self.table)
        display(self.figure)
        if self.inspector is not None:
            display(self.inspector)
        self.start()


def _losses(steps: pd.DataFrame) -> Figure:
    """Return the loss of SFT runs, which have no rollouts."""
    points = steps.rename(columns={"run_id": "line", "step": "x", "loss": "value"})
    return Figure(draw_panels([Panel("SFT loss", points)], x="step", hover="step %{x}: %{y:.3g}"), steps)


def _empty_figure(text: str = "No run with steps is selected.") -> Figure:
    figure = go.Figure()
    lines = "<br>".join(map(escaped, textwrap.wrap(text, 120)[:4]))
    figure.add_annotation(text=lines, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
    figure.update_layout(height=120).update_xaxes(visible=False).update_yaxes(visible=False)
    return Figure(figure, pd.DataFrame())


def overview(runs_dir: str | Path = "", *, selected: list[str] | None = None, every_s: float = 2.0) -> Overview:
    """Show all runs of a folder with sparklines; select several to overlay their curves. Updated while runs are written.

    A click on a point of a curve lists its rollouts in the inspector below.

    runs_dir: folder of runs, or of one run; default: the nearest runs/ folder. selected: ids of the runs whose curves are
    shown first; default: the newest run with rollouts. every_s: seconds between updates.
    Raises UserError for an invalid interval or an unknown run id, and RunStoreError if the folder does not exist.
    """
    shown = Overview(find_runs_dir(runs_dir), every_s, selected)
    run_ids = {row.run_id for row in shown.rows}
    if unknown := [run_id for run_id in shown.selected if run_id not in run_ids]:
        raise UserError(
            f"no run {unknown[0]!r} in {shown._reader.root}; there are: {', '.join(sorted(run_ids)) or 'none'}"
        )
    return shown
