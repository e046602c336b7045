"""Held-out results of one training by phase: before training, after SFT, after each stage of RL."""

from pathlib import Path

import pandas as pd

from rstar_lab.analysis.metrics import METRICS, measure
from rstar_lab.analysis.runs import open_runs
from rstar_lab.analysis.tables import format_estimate

_NAMES = {"base": "before training", "sft": "after SFT", "rl": "after RL"}


def phase_table(
    runs_dir: str | Path, name: str, metrics: tuple[str, ...] = ("pass1", "tool_error_rate_correct", "response_tokens")
) -> pd.DataFrame:
    """Return what a training changed on its held-out problems, as text for display.

    Args:
        runs_dir: Folder of the runs.
        name: Name of the training: the evaluations are the runs NAME-SET-base, -sft, -rl-STAGE and -rl.
        metrics: Metrics of the columns.

    Returns:
        One row per phase, in the order of the training, and one column per set and metric: "33.8% [29.6%, 38.3%]", with the
        95% interval over problems. `n` is the number of rollouts and problems.
        If the training has no evaluations, the table is empty and its column title says so.
    """
    runs = open_runs(runs_dir).runs()
    found = runs[runs.run_id.str.startswith(f"{name}-") & (runs.kind == "evaluate")].sort_values("created")
    rows = []
    for run_id in found.run_id:
        held_out, mark, phase = str(run_id).removeprefix(f"{name}-").partition("-")
        if mark and (phase in _NAMES or phase.startswith("rl-")):
            title = _NAMES.get(phase) or f"after stage {phase.removeprefix('rl-')}"
            for row in measure(open_runs(runs_dir, run_ids=[run_id]), metrics).itertuples():
                rows.append((title, held_out, METRICS[str(row.metric)].title, format_estimate(row)))
                size = f"{row.n:,} rollouts, {row.clusters:,} problems"
            rows.append((title, held_out, "n", size))
    if not rows:
        return pd.DataFrame(columns=["no evaluation: a recipe with `evaluate.sets` makes them"])
    table = pd.DataFrame(rows, columns=["model", "set", "metric", "value"])
    order = {column: list(dict.fromkeys(table[column])) for column in ("model", "set", "metric")}
    wide = table.pivot(index="model", columns=["set", "metric"], values="value").fillna("–")
    return wide.reindex(index=order["model"], columns=pd.MultiIndex.from_product([order["set"], order["metric"]]))
