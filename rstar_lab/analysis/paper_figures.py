"""The figures and tables of the rStar2-Agent paper, made from one's own runs."""

from typing import Any

import pandas as pd

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.analysis.metrics import curves, evaluations, measure
from rstar_lab.analysis.paper import published
from rstar_lab.analysis.runs import Runs


def results_table(runs: Runs | None = None) -> pd.DataFrame:
    """Return pass@1 by model and benchmark (the paper's main table), as shares; with `runs`, one row per finished evaluation too."""
    rows: list[dict[str, Any]] = [
        {"model": model} | {name: value / 100 for name, value in sets.items()}
        for model, sets in published()["pass1"].items()
    ]
    if runs is not None:
        table = runs.runs()
        kinds = dict(zip(table.run_id, table.kind, strict=True))
        for row in measure(runs, ["pass1"]).to_dict("records"):
            run_id = str(row["run_id"])
            if kinds.get(run_id) == "evaluate":
                problems = next(
                    (name for name in ("math500", "aime24", "aime25", "hmmt25") if name in run_id), "other set"
                )
                rows.append({"model": run_id, problems: float(row["value"])})
    return pd.DataFrame(rows)


def figures_of_the_paper(runs: Runs) -> dict[str, Figure | pd.DataFrame]:
    """Return the paper's figures and tables, made from your own runs, by name. Those that the runs have no data for are left out.

    `held-out accuracy`: evaluations during training, with the published values as lines. `training`: pass@1, tool errors in correct
    trajectories, response length and reflection words. `tool calls`: calls per step and seconds per call. `stages`: accuracy and length per
    stage. `results`: pass@1 by model and benchmark.
    """
    found: dict[str, Figure | pd.DataFrame] = {"training": plot_curves(runs)}
    held_out = [name for name in evaluations(runs) if name.endswith("/pass1")]
    if held_out:
        found["held-out accuracy"] = plot_curves(runs, held_out, reference=True)
    calls = runs.sql(
        """SELECT run_id, stage, step, count(*) AS calls, avg(run_s) AS seconds_per_call, avg(queue_s) AS queue_s
           FROM calls GROUP BY ALL ORDER BY ALL"""
    )
    if len(calls):
        found["tool calls"] = calls
    found["stages"] = stage_table(runs)
    found["results"] = results_table(runs)
    return found


def stage_table(runs: Runs) -> pd.DataFrame:
    """Return steps, last step, pass@1 of the training rollouts, response tokens and the last evaluations of each stage of each run."""
    names = ["pass1", "response_tokens", *(name for name in evaluations(runs) if name.endswith("/pass1"))]
    rows = []
    for (run_id, stage), part in curves(runs, names).groupby(["run_id", "stage"], sort=False):
        last = part.tail(max(1, len(part) // 10))
        rows.append(
            {"run_id": run_id, "stage": stage, "steps": len(part), "last_step": int(part.step.max())}
            | {name: float(last[name].mean()) for name in names[:2]}
            | {name: float(part[name].dropna().iloc[-1]) if part[name].notna().any() else None for name in names[2:]}
        )
    return pd.DataFrame(rows)
