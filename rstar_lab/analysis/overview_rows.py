"""Rows of the overview of runs: state, progress and sparklines of each run. Only runs that changed are read again."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rstar_lab.analysis.alerts import alerts_of_steps, step_metrics, summarize_alerts
from rstar_lab.analysis.metrics import get_metric
from rstar_lab.analysis.rollout_classes import class_title, rollout_classes
from rstar_lab.analysis.runs import open_runs
from rstar_lab.runs import RunReader
from rstar_lab.runs.errors import READ_ERRORS
from rstar_lab.runs.reader import run_folders
from rstar_lab.visible_text import escaped, visible

ROLLED_UP = ("pass1", "tool_error_rate_correct", "response_tokens", "reflection_tokens", "entropy")
SERIES = {
    "pass1": "pass@1",
    "tool_error_rate_correct": "tool errors in correct",
    "response_tokens": "length (tokens)",
    "reflection_tokens": "reflection words",
    "mismatch": "mismatch",
    "entropy": "entropy (nats)",
}
COLUMNS = ("run", "state", "step", "s/step", *SERIES.values(), "trained", "parent", "alerts")
_POINTS, WIDTH, HEIGHT = 40, 80, 20  # size of a sparkline in pixels
_SPEED_STEPS = 5  # the speed is the median over this number of latest steps
_UNREADABLE = "unreadable"


@dataclass(frozen=True)
class OverviewRow:
    """One run of the overview.

    Attributes:
        step_s: Median seconds per step of the last steps.
        series: Values over steps by metric.
        classes: What became of the rollouts: number by class, see `rollout_classes`. They add up to `trajectories`.
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

    def cells(self) -> list[dict[str, str]]:
        """Return the cells in the order of COLUMNS: text, and optionally title (shown on hover) and points of a line."""
        return [
            {"text": visible(self.run_id)},
            {"text": visible(self.state), "title": visible(self.error)},
            {"text": "" if self.step is None else str(self.step)},
            {"text": "" if self.step_s is None else f"{self.step_s:.3g}"},
            *(sparkline(name, self.series.get(name, [])) for name in SERIES),
            self._trained(),
            {"text": visible(self.parent)},
            {"text": str(len(self.alerts) or ""), "title": visible("; ".join(self.alerts))},
        ]

    def _trained(self) -> dict[str, str]:
        """Return the share of the rollouts that were trained on; the title names the classes of the others."""
        if not self.classes:
            return {"text": ""}
        listed = "; ".join(f"{count:,} {class_title(name)}" for name, count in self.classes.items())
        share = self.classes.get("trained", 0) / max(1, sum(self.classes.values()))
        return {"text": f"{share:.0%}", "title": visible(listed)}


class OverviewRows:
    """Reads the rows of a folder of runs, or of one run. Unchanged runs come from memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._rows: dict[Path, tuple[tuple, OverviewRow]] = {}

    def read(self) -> list[OverviewRow]:
        """Return one row per run, newest first. A damaged run has the state "unreadable" and its error.

        Start times have a resolution of one second; runs of the same second are in descending order of their ids.
        """
        folders = [self.root] if (self.root / "run.json").exists() else run_folders(self.root)
        states = {folder: _state(folder) for folder in folders}
        changed = [folder for folder in folders if self._rows.get(folder, (None,))[0] != states[folder]]
        for folder, row in _read_rows(changed).items():
            self._rows[folder] = (states[folder], row)
        rows = [self._rows[folder][1] for folder in folders]
        return sorted(rows, key=lambda row: (row.created, row.run_id), reverse=True)


def _state(folder: Path) -> tuple:
    """Return a value that changes when a step is written and when the run starts or ends."""
    values: list[object] = []
    for name in ("metrics.jsonl", "run.json"):
        try:
            stat = (folder / name).stat()
        except FileNotFoundError:
            continue
        values.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    try:
        values.append(RunReader(folder).status)
    except READ_ERRORS as error:
        values.append(str(error))
    return tuple(values)


def _read_rows(folders: list[Path]) -> dict[Path, OverviewRow]:
    if not folders:
        return {}
    try:
        return _read_readable(folders)
    except READ_ERRORS as error:
        if len(folders) == 1:
            return {folders[0]: OverviewRow(folders[0].name, _UNREADABLE, error=str(error) or type(error).__name__)}
        return {folder: row for path in folders for folder, row in _read_rows([path]).items()}


def _read_readable(folders: list[Path]) -> dict[Path, OverviewRow]:
    runs = open_runs(folders)
    frame = step_metrics(runs, ROLLED_UP, ["step_s"])
    frame = frame.astype({name: float for name in (*SERIES, "step_s")})
    by_run = dict(list(frame.groupby("run_id")))
    alerts = dict(list(summarize_alerts(alerts_of_steps(frame)).groupby("run_id")))
    classes = {
        str(run_id): dict(zip(own.rollout_class, own.rollouts, strict=True))
        for run_id, own in rollout_classes(runs).groupby("run_id")
    }
    rows: dict[Path, OverviewRow] = {}
    for folder in folders:
        reader = RunReader(folder)
        info, part = reader.info, by_run.get(reader.run_id, frame.iloc[:0])
        values = {name: _recorded(part[name].to_numpy()) for name in (*SERIES, "step_s")}
        parent = info.get("parent") or {}
        run_alerts = alerts.get(reader.run_id)
        rows[folder] = OverviewRow(
            run_id=reader.run_id,
            state=reader.status,
            created=str(info.get("created") or ""),
            step=int(part.step.max()) if len(part) else None,
            trajectories=int(part.n.sum()),
            step_s=float(np.median(values["step_s"][-_SPEED_STEPS:])) if len(values["step_s"]) else None,
            parent=", step ".join(str(parent[key]) for key in ("run", "step") if parent.get(key) is not None),
            alerts=()
            if run_alerts is None
            else tuple(f"{a.alert} from step {a.step}: {a.evidence}" for a in run_alerts.itertuples()),
            series={name: values[name].tolist() for name in SERIES},
            classes=classes.get(reader.run_id, {}),
        )
    return rows


def _recorded(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


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
    return {"text": f"{values[-1]:.1%}" if percent else f"{values[-1]:.3g}", "points": points}


def _cell_html(cell: dict[str, str]) -> str:
    """Return a cell as HTML."""
    line = ""
    if points := cell.get("points"):
        line = (
            f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">'
            f'<polyline points="{escaped(points)}" fill="none" stroke="currentColor" stroke-width="1.3"/></svg>'
        )
    return f"<td style='text-align:left' title=\"{escaped(cell.get('title', ''))}\">{line}{escaped(cell['text'])}</td>"


def render_overview(rows: list[OverviewRow]) -> str:
    """Return the rows as an HTML table that needs no script."""
    if not rows:
        return "<p>No runs yet: <code>make demo</code> writes some.</p>"
    head = "".join(f"<th scope='col' style='text-align:left'>{column}</th>" for column in COLUMNS)
    body = "".join("<tr>" + "".join(map(_cell_html, row.cells())) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
