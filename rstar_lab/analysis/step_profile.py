"""Time profile of a step: its phases, tools, engines and slowest trajectories."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.runs import Runs
from rstar_lab.figure_theme import line_styles
from rstar_lab.runs import RunStoreError

# Sums over concurrent rollouts, which are not part of the step's wall-clock time.
_SUMS = ("tool_s", "queue_s", "engine_busy_s", "buffer_age_s")  # times that are not phases of the step
_TITLES = {
    "generate_s": "rollout",
    "verify_s": "verify",
    "log_probs_s": "log-probs",
    "update_s": "update",
    "weights_s": "weights to the engine",
    "store_s": "store",
    "checkpoint_s": "checkpoint",
    "wait_s": "wait",
}


@dataclass(frozen=True)
class StepProfile:
    """Time profile of a step. Result of `profile_step`.

    phases: phase, seconds (wall clock), share of the step. The phase `rest` is time outside of all measured phases.
    rollout: kind (generation, tool run, tool queue), rollout_s (sum over rollouts), share.
    stragglers: the slowest trajectories: traj_id, seconds, times_median (seconds over the median), generate_s, tool_s,
    queue_s, response_tokens, calls, engine.
    engines: engine, rollouts, busy_s (sum of generation seconds over rollouts), share.
    idle: measurements of idle engines or GPUs, by metric name; empty if the run has none.
    tail_share: share of the longest rollout's duration during which at most a tenth of the rollouts would still run if
    all had started together. It estimates the cost of waiting for the slowest rollouts.
    """

    run_id: str
    step: int
    step_s: float | None
    phases: pd.DataFrame
    rollout: pd.DataFrame
    stragglers: pd.DataFrame
    engines: pd.DataFrame
    idle: dict[str, float]
    tail_share: float


def profile_step(runs: Runs, run_id: str, step: int, *, stragglers: int = 10) -> StepProfile:
    """Return the time profile of one step. Raises RunStoreError if the run has no such step or no times."""
    steps = runs.steps({"run_id": run_id, "step": int(step)})
    if steps.empty:
        raise RunStoreError(f"run {run_id} has no step {step}")
    measured = steps.iloc[0]
    rows = runs.trajectories({"run_id": run_id, "step": int(step)})
    total, phases = _phases(measured)
    if phases.empty and rows.generate_s.isna().all():
        raise RunStoreError(f"run {run_id} has no measured times at step {step}")
    # tool_s includes queue_s.
    spent = {
        "generation": rows.generate_s.sum(),
        "tool run": (rows.tool_s - rows.queue_s.fillna(0)).clip(lower=0).sum(),
        "tool queue": rows.queue_s.sum(),
    }
    rollout = pd.DataFrame({"kind": list(spent), "rollout_s": list(spent.values())})
    rollout["share"] = rollout.rollout_s / max(rollout.rollout_s.sum(), 1e-12)
    rows["seconds"] = rows[["generate_s", "tool_s"]].sum(axis=1, min_count=1)
    rows["times_median"] = rows.seconds / rows.seconds.median()
    slow = rows.sort_values("seconds", ascending=False).head(stragglers)
    columns = [
        "traj_id",
        "seconds",
        "times_median",
        "generate_s",
        "tool_s",
        "queue_s",
        "response_tokens",
        "calls",
        "engine",
    ]
    engines = rows.groupby("engine", as_index=False).agg(rollouts=("traj_id", "size"), busy_s=("generate_s", "sum"))
    engines["share"] = engines.busy_s / max(engines.busy_s.sum(), 1e-12)
    idle = {
        str(name): float(value)
        for name, value in measured.items()
        if "idle" in str(name) and isinstance(value, int | float | np.number)
    }
    longest = rows.seconds.max()
    tail = float(1 - rows.seconds.quantile(0.9) / longest) if longest and np.isfinite(longest) else float("nan")
    return StepProfile(run_id, step, total, phases, rollout, slow[columns].reset_index(drop=True), engines, idle, tail)


def _phases(measured: pd.Series) -> tuple[float | None, pd.DataFrame]:
    seconds = {
        str(name): float(value)
        for name, value in measured.items()
        if str(name).endswith("_s") and _is_number(value) and name not in _SUMS
    }
    total = seconds.pop("step_s", None)
    rows = [(_TITLES.get(name, name.removesuffix("_s").replace("_", " ")), value) for name, value in seconds.items()]
    if total is not None and (rest := total - sum(seconds.values())) > 0.005 * total:
        rows.append(("rest", rest))
    frame = pd.DataFrame(rows, columns=["phase", "seconds"])
    frame["share"] = frame.seconds / (total or max(frame.seconds.sum(), 1e-12))
    return total, frame


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and bool(np.isfinite(value))


def plot_time(runs: Runs, run_id: str) -> Figure:
    """Plot the seconds of each phase, stacked, over the steps of a run."""
    steps = runs.steps({"run_id": run_id})
    parts = [_phases(row)[1].assign(step=row["step"]) for _, row in steps.iterrows()]
    frame = (
        pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["phase", "seconds", "share", "step"])
    )
    if frame.empty:
        raise RunStoreError(f"run {run_id} has no measured times")
    figure = go.Figure()
    for number, (phase, (colour, _, _)) in enumerate(line_styles(list(dict.fromkeys(frame.phase))).items()):
        part = frame[frame.phase == phase]
        figure.add_bar(
            x=part.step,
            y=part.seconds,
            name=str(phase),
            marker={"color": colour, "pattern": {"shape": ("", "/", "x", ".")[number // 4 % 4]}},
            customdata=[f"run_id = '{run_id}' AND step = {step}" for step in part.step],
            hovertemplate="step %{x}<br>" + str(phase) + ": %{y:.2f} s<extra></extra>",
        )
    figure.update_layout(barmode="stack", height=400)
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="seconds")
    return Figure(figure, frame)
