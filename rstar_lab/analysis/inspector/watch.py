"""Follow a run in a notebook: its curves and newest trajectories, updated while a job writes them."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from IPython.display import display
from plotly.subplots import make_subplots

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.inspector.inspector import Inspector
from rstar_lab.analysis.inspector.link import LinkedFigure
from rstar_lab.analysis.runs import open_runs
from rstar_lab.analysis.style import COLOURS
from rstar_lab.errors import UserError
from rstar_lab.runs import RunReader

# Columns of a run's steps and their titles.
CURVES = {
    "reward_mean": "Reward",
    "errors_mean": "Tool errors per rollout",
    "response_tokens_mean": "Response tokens",
    "entropy_mean": "Entropy, nats",
}


class Watch:
    """Curves and an inspector that follow one run.

    It reads only the run's folder, so `watch(run)` shows the same run again after a kernel restart.
    """

    def __init__(self, run_dir: Path, curves: Sequence[str], every_s: float) -> None:
        self.reader = RunReader(run_dir)
        self.runs = open_runs(run_dir)
        self.curves, self.every_s = list(curves), every_s
        self._steps = -1
        steps = self.runs.steps()
        self.inspector = Inspector(self.runs, label=self.reader.run_id) if len(steps) else None
        self.figure = LinkedFigure(self._draw(steps), self.inspector)
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Update the display until the run ends. Without a running event loop (in a script) this does nothing."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if self.reader.status == "running" and self.task is None:
            self.task = loop.create_task(self._follow())

    def stop(self) -> None:
        """Stop updating. The display stays."""
        if self.task is not None:
            self.task.cancel()

    def refresh(self) -> str:
        """Update the display once. Returns the run's status."""
        status = self.reader.status
        steps = self.runs.steps()
        if len(steps) != self._steps or status != "running":
            self._steps = len(steps)
            self.figure.update_figure(self._draw(steps, status))
            if self.inspector is None and len(steps):
                self.inspector = Inspector(self.runs, label=self.reader.run_id)
                self.figure.inspector = self.inspector
                display(self.inspector)
            elif self.inspector is not None:
                self.inspector.refresh()
        return status

    async def _follow(self) -> None:
        while self.refresh() == "running":  # noqa: ASYNC110 (another process writes the run)
            await asyncio.sleep(self.every_s)

    def _draw(self, steps: pd.DataFrame, status: str | None = None) -> go.Figure:
        drawn = [name for name in self.curves if name in steps and steps[name].notna().any()]
        figure = make_subplots(
            rows=1, cols=max(1, len(drawn)), subplot_titles=[CURVES.get(name, name) for name in drawn]
        )
        for place, name in enumerate(drawn, 1):
            figure.add_scatter(
                x=steps["step"], y=steps[name], mode="lines+markers", line_color=COLOURS[0], showlegend=False, row=1, col=place,
                meta={"filter": {"run_id": self.reader.run_id}, "x": "step"},
            )  # fmt: skip
        title = f"{self.reader.run_id}: {status or self.reader.status}"
        if len(steps):
            title += f", step {int(steps['step'].max())}"
        else:
            title += ", no step yet"
        figure.update_layout(height=300, title=title)
        figure.update_xaxes(title_text="step")
        return Figure(figure, steps)

    def _ipython_display_(self, **_: Any) -> None:
        display(self.figure)
        if self.inspector is not None:
            display(self.inspector)
        self.start()


def watch(run: str | Path, *, curves: Sequence[str] = tuple(CURVES), every_s: float = 2.0) -> Watch:
    """Follow a run in a notebook. Display the result.

    run: the run's folder, runs/NAME. curves: columns of `open_runs(...).steps()`; columns that the run does not have are
    skipped. every_s: seconds between updates.
    Raises UserError for an invalid interval and RunStoreError if the folder is not a run.
    """
    if not (math.isfinite(every_s) and every_s > 0):
        raise UserError(f"every_s must be a positive number of seconds, not {every_s}")
    return Watch(Path(run), curves, every_s)
