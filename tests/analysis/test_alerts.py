"""Tests of the alerts: each detector fires at its first step, and not on a healthy run."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rstar_lab.analysis import find_alerts, open_runs, plot_curves
from rstar_lab.analysis.alerts import DETECTORS, alerts_of_steps
from rstar_lab.runs import RunWriter

GOLDEN = Path(__file__).parent.parent / "golden" / "runs"
HEALTHY = {
    "reward": 1.0, "entropy": 0.5, "model_tokens": 100, "response_tokens": 100, "calls": 2, "errors": 0,
    "outcomes": ["ok", "ok"], "p_format": 0.0, "truncated": False,
}  # fmt: skip
METRICS = {"mismatch": 0.001, "correct_unrewarded": 0.0, "groups": 10, "equal_groups": 2}
BAD = {
    "entropy collapse": ({"entropy": 0.05}, {}),
    "length collapse": ({"response_tokens": 40}, {}),
    "length growth": ({"response_tokens": 400}, {}),
    "mismatch": ({}, {"mismatch": 0.2}),
    "reward": ({}, {"correct_unrewarded": 0.4}),
    "tool failures": ({"outcomes": ["ok", "sandbox_error"], "calls": 1}, {}),
    "tool errors": ({"outcomes": ["exception", "timeout"], "errors": 2}, {}),
    "duplicate answers": ({"p_format": 0.5}, {}),
    "truncation": ({"truncated": True}, {}),
    "no learning signal": ({}, {"equal_groups": 10}),
}


def write_run(folder, run_id, row, metrics, bad_steps=(5, 7)):
    with RunWriter.open(folder, run_id, kind="train", recipe={}, seed=0) as writer:
        for step in range(1, 9):
            changed = (row, metrics) if step in bad_steps else ({}, {})
            writer.write_step(
                "rl",
                step,
                trajectories=[HEALTHY | {"traj_id": f"{run_id}/{step}/{i}"} | changed[0] for i in range(2)],
                calls=[],
                transcripts=[],
                metrics=METRICS | changed[1],
            )


def test_every_detector_has_a_case():
    assert {detector.name for detector in DETECTORS} == BAD.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_detector_reports_first_and_last_step(tmp_path, name):
    write_run(tmp_path, "bad", *BAD[name])
    write_run(tmp_path, "healthy", {}, {})
    alerts = find_alerts(open_runs(tmp_path))
    assert alerts[["run_id", "alert"]].to_numpy().tolist() == [["bad", name]]
    alert = alerts.iloc[0]
    assert (alert.step, alert["last"], alert.steps) == (5, 7, 2)
    assert f"{alert.value:.3g}" in alert.evidence and f"{alert.threshold:.3g}" in alert.evidence


def test_a_condition_limits_the_steps_but_not_the_reference(tmp_path):
    write_run(tmp_path, "bad", *BAD["entropy collapse"])
    alerts = find_alerts(open_runs(tmp_path), "step >= 6")
    assert (alerts.step.tolist(), alerts.steps.tolist()) == ([7], [1])
    assert find_alerts(open_runs(tmp_path), "step < 5").empty


@pytest.mark.slow
def test_curves_mark_the_first_step_of_an_alert(tmp_path):
    write_run(tmp_path, "bad", *BAD["entropy collapse"])
    runs = open_runs(tmp_path)
    for x, place in (("step", 5), ("rollouts", 10)):
        figure = plot_curves(runs, ["pass1", "entropy"], x=x)
        (marks,) = [trace for trace in figure.data if trace.name == "alerts"]
        (curve,) = [trace for trace in figure.data if trace.name == "bad" and trace.yaxis == marks.yaxis]
        assert list(marks.marker.color) == [curve.line.color]
        assert list(marks.x) == [place] and list(marks.y) == pytest.approx([0.05])
        assert "entropy collapse" in marks.text[0] and runs.count(marks.customdata[0]) == 2
    assert all(trace.name != "alerts" for trace in plot_curves(runs, ["pass1"]).data)


def test_the_golden_runs_have_no_alerts():
    assert find_alerts(open_runs(GOLDEN, run_ids=["tiny_fast-rl"])).empty


def test_runs_without_steps_have_no_alerts(tmp_path):
    with RunWriter.open(tmp_path, "empty", kind="train", recipe={}, seed=0):
        assert find_alerts(open_runs(tmp_path)).empty


def test_the_curves_of_the_paper_raise_no_alert():
    """Lengths 1K to 8K over 510 steps, reward up to 0.75, entropy 0.6 to 0.3, truncation 10% to 5%; without the reward it is a fault."""
    n = np.arange(510)
    frame = pd.DataFrame(
        {"run_id": "paper", "stage": "rl", "step": n + 1, **{detector.metric: np.nan for detector in DETECTORS}}
    )
    frame = frame.assign(
        response_tokens=np.interp(n, [0, 100, 250, 400, 509], [1000, 2500, 4000, 6000, 8000]), reward=np.linspace(0.35, 0.75, 510),
        entropy=np.linspace(0.6, 0.3, 510), truncation_rate=np.linspace(0.1, 0.05, 510),
        groups_without_signal=np.linspace(0.3, 0.85, 510), tool_error_rate=np.linspace(0.2, 0.05, 510),
    )  # fmt: skip
    assert alerts_of_steps(frame).empty
    assert set(alerts_of_steps(frame.assign(reward=0.35)).alert) == {"length growth"}
