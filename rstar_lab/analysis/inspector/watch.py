"""Follow a run in a notebook: its curves and newest trajectories, updated while a job writes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import display
from plotly.subplots import make_subplots

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figure_theme import COLOURS
from rstar_lab.analysis.inspector.inspector import Inspector
from rstar_lab.analysis.inspector.link import LinkedFigure
from rstar_lab.analysis.inspector.widget import Follower
from rstar_lab.analysis.runs import open_runs
from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunReader
from rstar_lab.untrusted.recipes import ForeignRecipe
from rstar_lab.untrusted.text import duration, escaped

# Columns of a run's steps and their titles. SFT runs have only the loss, RL runs all others.
CURVES = {
    "reward_mean": "Reward",
    "errors_mean": "Tool errors per rollout",
    "response_tokens_mean": "Response tokens",
    "entropy_mean": "Entropy, nats",
    "loss": "Loss",
}
_MAX_CURVES = 4


_SPEED_STEPS = 10  # the speed is the median over this number of latest steps
_FIRST_STEPS = 3  # the change of a value refers to the mean over this number of first steps
_STRIP = 10  # characters of the step strip


def heading(reader: RunReader, steps: pd.DataFrame, status: str) -> str:
    """Return "RUN: STATUS, step 12 of 40 ▰▰▰▱▱▱, 3.2 s/step, 1 min left". Parts that are not known are left out."""
    if not len(steps):
        return f"{reader.run_id}: {status}, no step yet"
    step = int(steps["step"].max())
    total = planned_steps(reader.info["recipe"], str(steps["stage"].iloc[-1]))
    strip = "▰" * (done := round(_STRIP * min(1.0, step / total))) + "▱" * (_STRIP - done) if total else ""
    parts = [f"{reader.run_id}: {status}, step {step}" + (f" of {total} {strip}" if total else "")]
    if speed := seconds_per_step(steps):
        parts.append(f"{speed:.3g} s/step")
        if total and status == "running":
            parts.append(f"{duration(speed * max(0, total - step))} left")
    return ", ".join(parts)


def tile(title: str, values: pd.Series) -> str:
    """Return three lines: the title of a curve, its last value, and the change since the mean of the first three steps."""
    recorded = values.dropna().astype(float)
    change = float(recorded.iloc[-1] - recorded.head(_FIRST_STEPS).mean())
    since = f"{change:+.3g} since the start" if len(recorded) > _FIRST_STEPS else ""
    return f"{title}<br><b>{recorded.iloc[-1]:.3g}</b><br>{since}"


def planned_steps(recipe: ForeignRecipe, stage: str) -> int | None:
    """Return the number of RL steps in the recipe. None for SFT and evaluations, whose number of steps is not in the recipe."""
    stages = recipe.get("stages") or []
    planned = [part.get("steps") for part in stages] if stage in {part.get("name") for part in stages} else []
    return sum(planned) if planned and all(isinstance(steps, int) for steps in planned) else None


def seconds_per_step(steps: pd.DataFrame) -> float | None:
    """Return the median `step_s` of the latest steps. None for runs without it, such as those of SFT."""
    known = pd.to_numeric(steps["step_s"]).dropna() if "step_s" in steps else pd.Series(dtype=float)
    return float(known.tail(_SPEED_STEPS).median()) if len(known) else None


def _has_rollouts(steps: pd.DataFrame) -> bool:
    return "reward_mean" in steps and bool(steps["reward_mean"].notna().any())


class Watch(Follower):
    """Curves and an inspector that follow one run, or several runs of a job one after the other.

    It reads only the folders of the runs, so the same call shows the same runs again after a kernel restart.
    """

    def __init__(self, folders: Sequence[Path], every_s: float) -> None:
        super().__init__(every_s)
        self.folders = list(folders)
        self.reader: RunReader | None = None
        self.inspector: Inspector | None = None
        self._steps = -1
        self.figure = LinkedFigure(self._draw(pd.DataFrame()), None)
        self.refresh()

    def refresh(self) -> str:
        """Update the display once. Returns the status of the current run, or "waiting" before the first run starts."""
        started = [folder for folder in self.folders if (folder / "run.json").exists()]
        if not started:
            return "waiting"
        if self.reader is None or self.reader.run_dir != started[-1]:
            self.reader, self.runs, self._steps = RunReader(started[-1]), open_runs(started[-1]), -1
            if self.inspector is not None and _has_rollouts(self.runs.steps()):
                self.inspector.set_store(self.runs, self.reader.run_id)
        status = self.reader.status
        steps = self.runs.steps()
        if len(steps) != self._steps or status != "running":
            self._steps = len(steps)
            self.figure.update_figure(self._draw(steps, status))
            if self.inspector is None and _has_rollouts(steps):
                self.runs = open_runs(self.reader.run_dir)
                self.inspector = Inspector(self.runs, label=self.reader.run_id)
                self.figure.inspector = self.inspector
                self.figure.linked = True
                if self.task is not None:
                    display(self.inspector)
            elif self.inspector is not None:
                self.inspector.refresh()
        return status

    def ended(self) -> bool:
        """Return whether no more steps will come: the last run has ended, or an earlier one did not finish."""
        if self.reader is None:
            return False
        status = self.reader.status
        return status != "running" and (status != "finished" or self.reader.run_dir == self.folders[-1])

    async def update(self) -> None:
        self.refresh()

    def _draw(self, steps: pd.DataFrame, status: str = "waiting") -> Figure:
        run_id = self.reader.run_id if self.reader else self.folders[0].name
        columns = [name for name in CURVES if name in steps and steps[name].notna().any()][:_MAX_CURVES]
        titles = [tile(CURVES.get(name, name), steps[name]) for name in columns]
        figure = make_subplots(rows=1, cols=max(1, len(columns)), subplot_titles=titles)
        for place, name in enumerate(columns, 1):
            figure.add_scatter(
                x=steps["step"], y=steps[name], mode="lines+markers", line_color=COLOURS[0], showlegend=False, row=1, col=place,
                meta={"filter": {"run_id": run_id}, "x": "step"},
            )  # fmt: skip
        figure.update_xaxes(title_text="step")
        if not columns:
            figure.update_xaxes(visible=False).update_yaxes(visible=False)
        title = heading(self.reader, steps, status) if self.reader else f"{run_id}: {status}, no step yet"
        figure.update_layout(height=345 if columns else 80, title=escaped(title))
        return Figure(figure, steps)

    def _ipython_display_(self, **_: Any) -> None:
        display(self.figure)
        if self.inspector is not None:
            display(self.inspector)
        self.start()


def watch(*runs: str | Path, every_s: float = 2.0) -> Watch:
    """Follow a run in a notebook. Display the result.

    runs: the run's folder, runs/NAME, or the folders of several runs in the order in which a job writes them, such as SFT
    and RL. The display moves on when the next run starts. Folders that do not exist yet are waited for if their parent
    folder exists.
    every_s: seconds between updates.
    Raises UserError for an invalid interval, for no run, and if a folder exists but is not a run.
    """
    if not runs:
        raise UserError("watch needs the folder of at least one run: runs/NAME")
    folders = [Path(run) for run in runs]
    for folder in folders:
        if (folder.exists() and not (folder / "run.json").exists()) or not folder.parent.is_dir():
            raise UserError(f"{folder} is not a run; give the folder of a run: runs/NAME")
    return Watch(folders, every_s)
