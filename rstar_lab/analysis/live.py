"""Watching a run while it goes on: curves and the newest trajectories, until it ends.

The display is plain output that is replaced in place, so it stays in a saved notebook and needs no browser. After a
kernel restart call `watch` again: everything is read from the run's folder.
"""

import asyncio
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rstar_lab.analysis.figures import DEFAULT_METRICS, plot_curves
from rstar_lab.analysis.metrics import metric_named
from rstar_lab.analysis.runs import Runs, open_runs, rows_of
from rstar_lab.runs import RunReader

_ENDED = ("finished", "failed", "stopped", "interrupted")


class Watch:
    """A run being watched: `stop()`, `wait()`, `status`, and `bundles()`, what is shown now."""

    def __init__(self, run_dir: Path, metrics: Sequence[str], interval_s: float, newest: int):
        for name in metrics:
            metric_named(name)
        self.run_dir, self.metrics, self.interval_s, self.newest = run_dir, list(metrics), interval_s, newest
        self.status = "not there yet"
        self._task: asyncio.Task | None = None
        self._stopped = False
        self._handles: list[Any] = []
        self._seen: Any = None

    def bundles(self) -> list[dict[str, Any]]:
        """MIME bundles of the headline, the curves and the newest trajectories, as the run stands."""
        if not (self.run_dir / "run.json").exists():
            return [
                _html(f"<p>waiting for run <code>{escape(str(self.run_dir))}</code> to begin</p>"),
                _html(""),
                _html(""),
            ]
        runs = open_runs(self.run_dir)
        steps = RunReader(self.run_dir).steps()
        self.status = RunReader(self.run_dir).status
        step, stage = max(steps, default=None), list(steps.values())[-1] if steps else None
        reached = f", stage {escape(str(stage))}, step {step}" if steps else ", no step yet"
        head = _html(
            f"<p><b>{escape(self.run_dir.name)}</b>: {self.status}{reached} <small>({time.strftime('%X')})</small></p>"
        )
        if not steps or not runs.count():
            return [head, _html(""), _html("")]
        figure = plot_curves(runs, self.metrics, band=False)
        return [head, figure.bundle(), _html(_table(runs, self.newest))]

    def update(self) -> None:
        """Show the run as it stands, if it changed."""
        from IPython.display import display

        seen = _state(self.run_dir)
        if seen == self._seen:
            return
        bundles = self.bundles()
        if not self._handles:
            self._handles = [display(bundle, raw=True, display_id=True) for bundle in bundles]
        else:
            for handle, bundle in zip(self._handles, bundles, strict=True):
                handle.update(bundle, raw=True)
        self._seen = seen

    def stop(self) -> None:
        """Watch no longer; the run goes on."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()

    async def wait(self) -> str:
        """Until the run ends or `stop`; returns the run's status."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        return self.status

    async def _follow(self) -> None:
        while not self._stopped:
            self.update()
            if self.status in _ENDED:
                return
            await asyncio.sleep(self.interval_s)


def watch(
    run: str | Path,
    metrics: Sequence[str] = DEFAULT_METRICS,
    *,
    interval_s: float = 2.0,
    newest: int = 8,
) -> Watch:
    """Show a run's curves and newest trajectories in a notebook, updated until it ends. Other cells can run meanwhile.

    run: the run's folder; it may not be there yet. In a script (no event loop) this returns when the run has ended.
    """
    watched = Watch(Path(run), metrics, interval_s, newest)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(watched._follow())
        return watched
    watched.update()
    watched._task = loop.create_task(watched._follow())
    return watched


def _state(run_dir: Path) -> Any:
    """Changes with every step, and when the run ends or its writer is gone."""
    if not (run_dir / "run.json").exists():
        return None, "waiting"
    reader = RunReader(run_dir)
    return max(reader.steps(), default=-1), reader.status


def _html(text: str) -> dict[str, Any]:
    return {"text/html": text, "text/plain": ""}


def _table(runs: Runs, newest: int) -> str:
    rows = runs.trajectories(
        columns=[
            "traj_id",
            "step",
            "problem_id",
            "reward",
            "kept",
            "errors",
            "calls",
            "response_tokens",
            "answer",
            "truth",
        ],
        order_by="step DESC, traj_id",
        limit=newest,
    )
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in rows.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in rows_of(rows)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
