"""The figures and tables of the rStar2-Agent paper, made from one's own runs."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.analysis.filters import Where
from rstar_lab.analysis.line_panels import Panel, draw_panels
from rstar_lab.analysis.metrics import METRICS, curves, held_out_metrics, measure
from rstar_lab.analysis.paper import OTHER_SET, SETS, compact, published, set_name
from rstar_lab.analysis.runs import RunsLike, as_runs, open_runs, training_runs
from rstar_lab.analysis.tables import format_estimate
from rstar_lab.analysis.tokens import plot_high_entropy_words, plot_token_kinds, token_table
from rstar_lab.runs import RunStoreError
from rstar_lab.runs.reader import RunReader

DURING_TRAINING = r"-filter$|-step\d+$"  # names of evaluations that belong to a training run


def results_table(runs: RunsLike | None = None, metric: str = "pass1") -> pd.DataFrame:
    """Return a metric by model and benchmark, as the paper publishes it, with the RL steps and the table or figure (`source`); with
    `runs`, one row per finished evaluation too.

    metric: pass1 (a share), or response_tokens.
    """
    runs = None if runs is None else as_runs(runs)
    scale = 100 if metric == "pass1" else 1
    rows: list[dict[str, Any]] = [
        {"model": model}
        | {name: row[name] / scale for name in SETS if name in row}
        | {name: row[name] for name in ("steps", "source") if name in row}
        for model, row in published()[metric].items()
    ]
    if runs is not None:
        table = runs.runs()
        kinds = dict(zip(table.run_id, table.kind, strict=True))
        for row in measure(runs, [metric]).to_dict("records"):
            run_id = str(row["run_id"])
            if kinds.get(run_id) != "evaluate" or run_id.endswith("-filter"):  # of training problems
                continue
            sets = (RunReader(runs.run_dir(run_id)).info.get("result") or {}).get("sets")
            if isinstance(sets, dict):  # several sets in one evaluation
                values = {set_name(name): result.get(metric) for name, result in sets.items()}
            else:
                values = {next((name for name in SETS if name in compact(run_id)), OTHER_SET): row["value"]}
            # A result with an interval is [value, low, high].
            firsts = {name: value[0] if isinstance(value, list) else value for name, value in values.items()}
            rows.append({"model": run_id} | {name: float(value) for name, value in firsts.items() if value is not None})
    return pd.DataFrame(rows)


def figures_of_the_paper(runs: RunsLike) -> dict[str, Figure | pd.DataFrame]:
    """Return the paper's figures and tables, made from your own runs, by name. Those that the runs have no data for are left out.

    | name | content |
    |---|---|
    | `training` | pass@1, tool errors in correct trajectories, response length and reflection words |
    | `held-out accuracy` | evaluations during training, with the published values; without them, those of each model |
    | `ablation` | the same curves, and response length and tool errors, by the label of the recipes, if there are several |
    | `tool calls` | calls per step, and seconds per call with the time in the queue |
    | `tokens`, `words` | entropy of tokens before and after tool responses; words whose first token has the highest entropy |
    | `stages` | accuracy and length per stage |
    | `results`, `lengths` | pass@1, and response tokens, by model and benchmark |
    | `accuracy by turns` | pass@1 of evaluations over `evaluate.max_turns`, if it has several values |

    Args:
        runs: The runs, or their folder.
    """
    runs = as_runs(runs)
    table = runs.runs()
    training = {"run_id": training_runs(table).run_id.tolist()}
    found: dict[str, Figure | pd.DataFrame] = {"training": plot_curves(runs, where=training)}
    held_out = held_out_metrics(runs)
    if held_out:
        found["held-out accuracy"] = plot_curves(runs, held_out, reference=True, where=training)
    elif len(models := model_accuracy(runs)):
        found["held-out accuracy"] = _plot(models, "set", "step", {"pass1": "pass@1"})
    if "recipe.label" in table and table[table.kind == "train"]["recipe.label"].nunique() > 1:
        shown = [*held_out, "pass1", "response_tokens", "tool_error_rate_correct"]
        found["ablation"] = plot_curves(runs, shown, by="label")
    calls = runs.sql(
        f"""SELECT run_id, stage, step, count(*) AS calls, avg(run_s + coalesce(queue_s, 0)) AS seconds_per_call
            FROM calls WHERE {runs.condition(training, "calls")} GROUP BY ALL ORDER BY ALL"""
    )
    if len(calls):
        titles = {"calls": "calls per step", "seconds_per_call": "seconds per call"}
        found["tool calls"] = _plot(calls, "run_id", "step", titles)
    with suppress(RunStoreError):  # without token arrays
        tokens = token_table(runs, training)
        found |= {"tokens": plot_token_kinds(tokens), "words": plot_high_entropy_words(tokens)}
    stages = stage_table(runs, training)
    found |= {"stages": stages} if len(stages) else {}
    found |= {"results": results_table(runs), "lengths": results_table(runs, "response_tokens")}
    turns = table[(table.kind == "evaluate") & ~table.run_id.str.contains(DURING_TRAINING)]
    if "recipe.evaluate.max_turns" in turns and turns["recipe.evaluate.max_turns"].nunique() > 1:
        turns = turns.rename(columns={"recipe.evaluate.max_turns": "max_turns"})
        frame = measure(runs, ["pass1"]).merge(turns, on="run_id")
        name = next((key for key in ("extra.model", "recipe.model") if key in frame), "kind")
        found["accuracy by turns"] = _plot(frame.sort_values("max_turns"), name, "max_turns", {"value": "pass@1"})
    return found


def _plot(frame: pd.DataFrame, lines: str, x: str, panels: dict[str, str]) -> Figure:
    """Plot each column of `panels` over `x` in a panel of that title, with one line per value of the column `lines`."""
    points = pd.DataFrame({"line": frame[lines].astype(str), "x": frame[x]})
    drawn = [Panel(title, points.assign(value=frame[name])) for name, title in panels.items()]
    return Figure(draw_panels(drawn, x=x.replace("_", " "), hover="%{x}: %{y:.3g}"), frame)


def model_accuracy(runs: RunsLike) -> pd.DataFrame:
    """Return pass@1 of the models of training runs on each set: run_id (of the training), step (0: before RL), set, pass1, low, high."""
    runs = as_runs(runs)
    rows = []
    training = set(training_runs(runs.runs()).run_id)
    for row in measure(runs, ["pass1"]).to_dict("records"):
        name = str(row["run_id"])
        parent = RunReader(runs.run_dir(name)).info.get("parent") or {}
        run, step = str(parent.get("run")), parent.get("step")
        run, step = (run.removesuffix("-sft") + "-rl", 0) if step is None and run.endswith("-sft") else (run, step)
        start = run.removesuffix("rl")
        if run not in training or not name.startswith(start) or re.search(DURING_TRAINING, name):
            continue
        found = re.fullmatch(r"(.+?)-(?:base|sft|rl)(?:-.*)?", name.removeprefix(start))
        if found:
            values = {"pass1": row["value"], "low": row["low"], "high": row["high"]}
            rows.append({"run_id": run, "step": int(step or 0), "set": found[1]} | values)
    columns = ["run_id", "step", "set", "pass1", "low", "high"]
    return pd.DataFrame(rows, columns=columns).sort_values(["run_id", "set", "step"], ignore_index=True)


def stage_table(runs: RunsLike, where: Where = None) -> pd.DataFrame:
    """Return steps, last step, pass@1 of the training rollouts, response tokens and the last evaluations of each stage of each run.

    The columns `SET pass@1` are evaluations of the model after the stage.
    """
    runs = as_runs(runs)
    models = model_accuracy(runs)
    names = ["pass1", "response_tokens", *held_out_metrics(runs)]
    rows = []
    for (run_id, stage), part in curves(runs, names, where).groupby(["run_id", "stage"], sort=False):
        if part.pass1.isna().all():  # SFT
            continue
        last = part.tail(max(1, len(part) // 10))
        rows.append(
            {"run_id": run_id, "stage": stage, "steps": len(part), "last_step": int(part.step.max())}
            | {name: float(last[name].mean()) for name in names[:2]}
            | {name: float(part[name].dropna().iloc[-1]) if part[name].notna().any() else None for name in names[2:]}
            | {
                f"{row.set} pass@1": row.pass1
                for row in models[(models.run_id == run_id) & (models.step == part.step.max())].itertuples()
            }
        )
    return pd.DataFrame(rows)


_PHASES = {"base": "before training", "sft": "after SFT", "rl": "after RL"}


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
        If the training has no evaluations, the table is empty and the title of its only column states this.
    """
    runs = open_runs(runs_dir).runs()
    found = runs[runs.run_id.str.startswith(f"{name}-") & (runs.kind == "evaluate")].sort_values("created")
    rows = []
    for run_id in found.run_id:
        held_out, mark, phase = str(run_id).removeprefix(f"{name}-").partition("-")
        if mark and (phase in _PHASES or phase.startswith("rl-")):
            title = _PHASES.get(phase) or f"after stage {phase.removeprefix('rl-')}"
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
