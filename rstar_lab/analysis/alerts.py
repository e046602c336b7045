"""Alerts: steps of a run at which a value in the run store crosses a limit, which usually indicates a problem."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from rstar_lab.analysis.filters import Where
from rstar_lab.analysis.metrics import METRICS, curves
from rstar_lab.analysis.runs import Runs
from rstar_lab.common.resources import package_toml

FIRST_STEPS = 3  # number of first steps of a run and stage; relative limits refer to the median over them
KEYS = ["run_id", "stage", "step"]
COLUMNS = ["run_id", "stage", "alert", "metric", "step", "last", "steps", "value", "threshold", "evidence"]


@dataclass(frozen=True)
class Detector:
    """Compares a column of the steps with a threshold.

    limit: the threshold; with `relative`, times the median of the column over the first steps of the run and stage.
    below: alert if the value is below the threshold, else if it is above.
    unless: column that excuses the value while it is a tenth above its own reference: longer responses that are rewarded are no fault.
    """

    name: str
    metric: str
    limit: float
    meaning: str
    below: bool = False
    relative: bool = False
    unless: str | None = None


DETECTORS = tuple(Detector(name, **entry) for name, entry in package_toml(__file__, "alerts.toml").items())


def find_alerts(runs: Runs, where: Where = None) -> pd.DataFrame:
    """Return one row per alert: run_id, stage, alert, metric, step, last, steps, value, threshold, evidence.

    step, last: first and last step at which the detector fired; steps: number of such steps. value: at the first step.
    Relative thresholds compare with the median over the first three steps of the run and stage. `DETECTORS` lists the
    detectors. Reads only rollups and metrics.jsonl. where: a filter of steps.
    """
    fired = alerts_of_steps(step_metrics(runs))
    chosen = runs.sql(f"SELECT run_id, stage, step FROM rollup WHERE {runs.condition(where, 'steps')}")
    return summarize_alerts(fired.merge(chosen, on=KEYS))


def step_metrics(runs: Runs, metrics: Sequence[str] = (), columns: Sequence[str] = ()) -> pd.DataFrame:
    """Return one row per run, stage and step with the values that the detectors read.

    metrics: further names of METRICS. columns: further columns of `runs.steps()`, NaN where they are missing.
    """
    names = [name for detector in DETECTORS for name in (detector.metric, detector.unless) if name in METRICS]
    steps = runs.trainer_metrics()
    of_trainer = steps[KEYS].copy()
    for name in ("mismatch", "correct_unrewarded", *columns):
        of_trainer[name] = pd.to_numeric(steps[name]) if name in steps else np.nan
    both = {"equal_groups", "groups"} <= set(steps.columns)
    of_trainer["groups_without_signal"] = (
        pd.to_numeric(steps.equal_groups) / pd.to_numeric(steps.groups).replace(0, np.nan) if both else np.nan
    )
    return curves(runs, list(dict.fromkeys([*names, *metrics]))).merge(of_trainer, on=KEYS, how="left")


def alerts_of_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per detector and step of `step_metrics` at which it fires: run_id, stage, step, alert, metric, value, threshold,
    reference (NaN for an absolute threshold)."""
    frame = frame.sort_values(KEYS)
    parts = []
    for detector in DETECTORS:
        rows = frame.loc[frame[detector.metric].notna(), [*KEYS, detector.metric]]
        rows = rows.rename(columns={detector.metric: "value"}).astype({"value": float})
        reference = pd.Series(np.nan, rows.index)
        if detector.relative:
            first = rows.groupby(KEYS[:2]).cumcount() < FIRST_STEPS
            reference = _references(rows, "value")
            if detector.unless:
                first |= frame.loc[rows.index, detector.unless] > 1.1 * _references(frame, detector.unless)[rows.index]
            rows, reference = rows[~first], reference[~first]
        threshold = detector.limit * reference if detector.relative else detector.limit
        fired = rows["value"] < threshold if detector.below else rows["value"] > threshold
        rows = rows.assign(alert=detector.name, metric=detector.metric, threshold=threshold, reference=reference)
        parts.append(rows[fired])
    return pd.concat(parts)


def _references(frame: pd.DataFrame, column: str) -> pd.Series:
    """Return for each step the median of a column over the first steps of its run and stage."""
    known = frame[frame[column].notna()]
    medians = (
        known[known.groupby(KEYS[:2]).cumcount() < FIRST_STEPS].groupby(KEYS[:2])[column].median().rename("reference")
    )
    return frame.join(medians, on=KEYS[:2]).reference


def summarize_alerts(fired: pd.DataFrame) -> pd.DataFrame:
    """Return one row per run, stage and alert of `alerts_of_steps`: COLUMNS."""
    detectors = {detector.name: detector for detector in DETECTORS}
    rows = []
    for (run_id, stage, alert), steps in fired.sort_values("step").groupby(["run_id", "stage", "alert"]):
        detector, first = detectors[str(alert)], steps.iloc[0]
        side = "below" if detector.below else "above"
        start = f" (first steps: {first.reference:.3g})" if detector.relative else ""
        evidence = f"{detector.metric} {first.value:.3g} is {side} {first.threshold:.3g}{start}: {detector.meaning}"
        count = [int(steps.step.iloc[0]), int(steps.step.iloc[-1]), len(steps)]
        rows.append([run_id, stage, alert, detector.metric, *count, first.value, first.threshold, evidence])
    return pd.DataFrame(rows, columns=COLUMNS).sort_values(["run_id", "step", "alert"], ignore_index=True)
