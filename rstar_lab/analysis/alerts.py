"""Alerts: steps of a run at which a value in the run store crosses a limit, which usually indicates a problem."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from rstar_lab.analysis.metrics import METRICS, curves
from rstar_lab.analysis.runs import Runs, Where, sql_condition

FIRST_STEPS = 3  # number of first steps of a run and stage; relative limits refer to the median over them
COLUMNS = ["run_id", "stage", "alert", "metric", "step", "last", "steps", "value", "threshold", "evidence"]


@dataclass(frozen=True)
class Detector:
    """Compares a column of the steps with a threshold.

    threshold: function of the column's reference (the median over the first steps of the run and stage).
    below: alert if the value is below the threshold, else if it is above.
    """

    name: str
    metric: str
    threshold: Callable[[float], float]
    meaning: str
    below: bool = False
    relative: bool = False


DETECTORS = (
    Detector(
        "entropy collapse", "entropy", lambda first: 0.2 * first,
        "the policy has become almost deterministic", below=True, relative=True,
    ),
    Detector(
        "length collapse", "response_tokens", lambda first: 0.5 * first,
        "responses are less than half as long as in the first steps", below=True, relative=True,
    ),
    Detector(
        "length growth", "response_tokens", lambda first: 3 * first,
        "responses are more than three times as long as in the first steps", relative=True,
    ),
    Detector(
        "mismatch", "mismatch", lambda _: 0.05,
        "engine and trainer disagree: stale weights, another precision or another sampler",
    ),
    Detector(
        "reward", "correct_unrewarded", lambda _: 0.02,
        "rollouts that give the true answer get no reward: wrong sign, or an answer format that the model does not use",
    ),
    Detector(
        "tool failures", "our_failure_rate", lambda _: 0.05,
        "tool calls fail in the infrastructure, not because of the model",
    ),
    Detector("tool errors", "tool_error_rate", lambda _: 0.8, "most tool calls of the model fail"),
    Detector("duplicate answers", "duplicate_answers", lambda _: 0.5, "most rollouts have more than one answer tag"),
    Detector("truncation", "truncation_rate", lambda _: 0.5, "most rollouts end at a limit"),
    Detector(
        "no learning signal", "groups_without_signal", lambda _: 0.9,
        "almost all groups have equal rewards, so that few rollouts train the policy",
    ),
)  # fmt: skip


def find_alerts(runs: Runs, where: Where = None) -> pd.DataFrame:
    """Return one row per alert: run_id, stage, alert, metric, step, last, steps, value, threshold, evidence.

    step, last: first and last step at which the detector fired; steps: number of such steps. value: at the first step.
    Relative thresholds compare with the median over the first three steps of the run and stage. `DETECTORS` lists the
    detectors. Reads only rollups and metrics.jsonl. where: a condition on run_id, stage and step.
    """
    names = [detector.metric for detector in DETECTORS if detector.metric in METRICS]
    frame = curves(runs, list(dict.fromkeys(names)))
    frame = frame.merge(_of_trainer(runs), on=["run_id", "stage", "step"], how="left")
    condition, parameters = sql_condition(where)
    chosen = runs.sql(f"SELECT run_id, stage, step FROM rollup WHERE {condition}", parameters)
    wanted = set(chosen.itertuples(index=False, name=None))
    rows = []
    for (run_id, stage), steps in frame.groupby(["run_id", "stage"], sort=True):
        for detector in DETECTORS:
            known = steps[steps[detector.metric].notna()].sort_values("step")
            if detector.relative:
                reference = float(known[detector.metric].head(FIRST_STEPS).median())
                known = known.iloc[FIRST_STEPS:]
            else:
                reference = np.nan
            threshold = detector.threshold(reference)
            values = known[detector.metric].astype(float)
            fired = known[(values < threshold) if detector.below else (values > threshold)]
            fired = fired[[(run_id, stage, step) in wanted for step in fired.step]]
            if fired.empty:
                continue
            value = float(fired[detector.metric].iloc[0])
            side = "below" if detector.below else "above"
            start = f" (first steps: {reference:.3g})" if detector.relative else ""
            first, last, count = int(fired.step.iloc[0]), int(fired.step.iloc[-1]), len(fired)
            evidence = f"{detector.metric} {value:.3g} is {side} {threshold:.3g}{start}: {detector.meaning}"
            rows.append([run_id, stage, detector.name, detector.metric, first, last, count, value, threshold, evidence])
    return pd.DataFrame(rows, columns=COLUMNS).sort_values(["run_id", "step", "alert"], ignore_index=True)


def _of_trainer(runs: Runs) -> pd.DataFrame:
    """Return the metrics of the trainer that detectors read, and the share of groups with equal rewards, per step."""
    steps = runs.steps()
    frame = steps[["run_id", "stage", "step"]].copy()
    for name in ("mismatch", "correct_unrewarded"):
        frame[name] = pd.to_numeric(steps[name]) if name in steps else np.nan
    both = {"equal_groups", "groups"} <= set(steps.columns)
    frame["groups_without_signal"] = (
        pd.to_numeric(steps.equal_groups) / pd.to_numeric(steps.groups).replace(0, np.nan) if both else np.nan
    )
    return frame
