"""Published results of rStar2-Agent (arXiv 2508.20722), and the paper's figures and tables from one's own runs."""

import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from rstar_lab.analysis.figure import Figure
    from rstar_lab.analysis.runs import Runs

MODEL = "rStar2-Agent-14B"


@cache
def published() -> dict[str, Any]:
    """Return the published numbers: pass1 and response_tokens by model and set, stages, general benchmarks, tool calls."""
    return json.loads((resources.files("rstar_lab.analysis") / "paper.json").read_text())


def reference(metric: str, model: str = MODEL) -> float | None:
    """Return the published value of a metric such as eval/aime24/pass1, as a share for rates; None if the paper has none."""
    _, _, rest = metric.partition("eval/")
    problems, _, kind = rest.partition("/")
    value = published().get(kind, {}).get(model, {}).get(problems)
    if value is None:
        return None
    return value / 100 if kind == "pass1" else float(value)


def results_table(runs: "Runs | None" = None) -> pd.DataFrame:
    """Return pass@1 by model and benchmark (the paper's main table), as shares; with `runs`, one row per finished evaluation too."""
    rows: list[dict[str, Any]] = [
        {"model": model} | {name: value / 100 for name, value in sets.items()}
        for model, sets in published()["pass1"].items()
    ]
    if runs is not None:
        from rstar_lab.analysis.metrics import measure

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


def figures_of_the_paper(runs: "Runs") -> "dict[str, Figure | pd.DataFrame]":
    """Return the paper's figures and tables, made from your own runs, by name. Those that the runs have no data for are left out.

    `held-out accuracy`: evaluations during training, with the published values as lines. `training`: pass@1, tool errors in correct
    trajectories, response length and reflection words. `tool calls`: calls per step and seconds per call. `stages`: accuracy and length per
    stage. `results`: pass@1 by model and benchmark.
    """
    from rstar_lab.analysis.figures import plot_curves
    from rstar_lab.analysis.metrics import evaluations

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


def stage_table(runs: "Runs") -> pd.DataFrame:
    """Return steps, last step, pass@1 of the training rollouts, response tokens and the last evaluations of each stage of each run."""
    from rstar_lab.analysis.metrics import curves, evaluations

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
