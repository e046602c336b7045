"""An overview of all runs in a notebook: `overview(runs_dir)`."""

import asyncio
import math
import textwrap
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import traitlets
from IPython.display import display

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.analysis.inspector.inspector import Inspector
from rstar_lab.analysis.inspector.link import LinkedFigure
from rstar_lab.analysis.inspector.modules import join_modules
from rstar_lab.analysis.inspector.widget import NotebookWidget
from rstar_lab.analysis.metrics import curves
from rstar_lab.analysis.overview_rows import COLUMNS, ROLLED_UP, OverviewRow, OverviewRows, render_overview
from rstar_lab.analysis.runs import open_runs
from rstar_lab.errors import UserError
from rstar_lab.runs.errors import READ_ERRORS
from rstar_lab.runs.locate import find_runs_dir
from rstar_lab.visible_text import escaped

_CSS = """
.rl-overview { max-height: 420px; overflow: auto; }
.rl-overview table { border-collapse: collapse; font-size: 13px; white-space: nowrap; }
.rl-overview th { position: sticky; top: 0; z-index: 1; background: var(--jp-layout-color0, Canvas); text-align: left; }
.rl-overview th, .rl-overview td { padding: 2px 8px; text-align: left; }
.rl-overview td { vertical-align: middle; }
.rl-overview svg { vertical-align: middle; margin-right: 4px; }
.rl-overview tbody tr { cursor: pointer; }
.rl-overview tr.rl-chosen td { background: var(--jp-layout-color2, rgba(127, 127, 127, 0.2)); }
"""


class RunTable(NotebookWidget):
    """The table of runs with a check box per run. selected: run ids whose curves are shown."""

    _esm = join_modules("dom", "overview")
    _css = _CSS

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

    def static_bundle(self) -> dict[str, Any]:
        return {"text/html": render_overview(self.rows), "text/plain": "\n".join(row.run_id for row in self.rows)}

    def replacement(self) -> "RunTable":
        widget = RunTable(self.rows, selected=self.selected)
        traitlets.link((self, "selected"), (widget, "selected"))
        traitlets.dlink((self, "table_rows"), (widget, "table_rows"))
        return widget


class Overview:
    """All runs of a folder in a table, the curves of the selected runs, and an inspector of their rollouts.

    `selected` can be set from Python. Executed without a kernel, the table and the figure stay readable.
    """

    def __init__(self, root: Path, every_s: float, selected: list[str] | None) -> None:
        self.every_s = every_s
        self.task: asyncio.Task[None] | None = None
        self.inspector: Inspector | None = None
        self._reader = OverviewRows(root)
        self.rows = self._reader.read()
        if selected is None:
            with_rollouts = [row for row in self.rows if row.trajectories and row.step is not None]
            # Evaluations have one step; the newest run with a curve says more.
            selected = [row.run_id for row in sorted(with_rollouts, key=lambda row: row.step == 1)][:1]
        self.table = RunTable(self.rows, selected=selected)
        self.figure = LinkedFigure(_empty_figure(), None)
        self._draw()
        self.table.observe(lambda _: self._draw(), "selected")

    @property
    def selected(self) -> list[str]:
        """Ids of the runs whose curves are shown."""
        return self.table.selected

    @selected.setter
    def selected(self, run_ids: list[str]) -> None:
        self.table.selected = list(run_ids)

    def to_html(self) -> str:
        """Return the table as HTML that needs no kernel and no script."""
        return render_overview(self.rows)

    def refresh(self) -> None:
        """Read the runs that changed and update the display."""
        self._show(self._reader.read())

    def stop(self) -> None:
        """Stop updating. The display stays."""
        if self.task is not None:
            self.task.cancel()
            self.task = None

    def _show(self, rows: list[OverviewRow]) -> None:
        if rows == self.rows:
            return
        before = self._of_selected()
        self.rows = rows
        self.table.set_rows(rows)
        if self._of_selected() != before:
            self._draw(new_store=False)

    def _of_selected(self) -> list[OverviewRow]:
        """Return the selected runs that have rollouts."""
        return [row for row in self.rows if row.run_id in self.selected and row.trajectories]

    def _draw(self, new_store: bool = True) -> None:
        """Draw the curves of the selected runs and list their rollouts. new_store: the selection changed."""
        run_ids = [row.run_id for row in self._of_selected()]
        if not run_ids:
            self.figure.update_figure(_empty_figure())
            return
        try:
            self._draw_runs(run_ids, new_store)
        except READ_ERRORS as error:
            self.figure.update_figure(_empty_figure(f"A selected run cannot be read: {error}"))

    def _draw_runs(self, run_ids: list[str], new_store: bool) -> None:
        root = self._reader.root
        runs = open_runs(root, run_ids=run_ids)
        frame = curves(runs, ROLLED_UP)
        names = [name for name in ROLLED_UP if frame[name].notna().any()]
        self.figure.update_figure(plot_curves(runs, names) if names else _empty_figure())
        if self.inspector is None:
            self.inspector = Inspector(runs, label="selected runs")
            self.figure.inspector, self.figure.linked = self.inspector, True
        elif new_store:
            self.inspector.set_store(runs, "selected runs")
        else:
            self.inspector.refresh()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self.every_s)
            try:
                self._show(await asyncio.to_thread(self._reader.read))
            except READ_ERRORS:  # a run was moved or cut between two reads: the next update shows it
                continue

    def _ipython_display_(self, **_: Any) -> None:
        display(self.table)
        display(self.figure)
        if self.inspector is not None:
            display(self.inspector)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if self.task is None:
            self.task = loop.create_task(self._follow())


def _empty_figure(text: str = "Select runs with rollouts in the table to see their curves.") -> Figure:
    figure = go.Figure()
    figure.add_annotation(
        text="<br>".join(map(escaped, textwrap.wrap(text, 120)[:4])),
        showarrow=False,
        x=0.5,
        y=0.5,
        xref="paper",
        yref="paper",
    )
    figure.update_layout(height=120).update_xaxes(visible=False).update_yaxes(visible=False)
    return Figure(figure, pd.DataFrame())


def overview(runs_dir: str | Path = "", *, selected: list[str] | None = None, every_s: float = 2.0) -> Overview:
    """Show all runs of a folder with sparklines; select several to overlay their curves. Updated while runs are written.

    A click on a point of a curve lists its rollouts in the inspector below.

    runs_dir: folder of runs, or of one run; default: the nearest runs/ folder. selected: ids of the runs whose curves are
    shown first; default: the newest run with rollouts. every_s: seconds between updates.
    Raises UserError for an invalid interval or an unknown run id, and RunStoreError if the folder does not exist.
    """
    if not (math.isfinite(every_s) and every_s > 0):
        raise UserError(f"every_s must be a positive number of seconds, not {every_s}")
    shown = Overview(find_runs_dir(runs_dir), every_s, selected)
    run_ids = {row.run_id for row in shown.rows}
    if unknown := [run_id for run_id in shown.selected if run_id not in run_ids]:
        raise UserError(
            f"no run {unknown[0]!r} in {shown._reader.root}; there are: {', '.join(sorted(run_ids)) or 'none'}"
        )
    return shown
