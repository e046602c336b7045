"""The ablation table and figure: arms compared with a control, paired by seed, from the rollups of their runs.

An arm is the set of runs that share the recipe key `label`; each has its own seed. The value of a metric for a run is
the ratio of its sums over the last steps. Differences to the control are paired by seed, with Student's 95% interval
over the seeds and p values corrected for all comparisons of the table (Holm 1979).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.line_panels import draw_panels, mean_panel
from rstar_lab.analysis.metrics import get_metric
from rstar_lab.analysis.runs import Runs, RunsLike, as_runs, recipe_changes, training_runs
from rstar_lab.analysis.tables import format_difference
from rstar_lab.common.errors import UserError
from rstar_lab.common.estimates import holm, mean_interval
from rstar_lab.runs import RunStoreError

METRICS = ("pass1", "tool_error_rate_correct", "duplicate_answers", "response_tokens", "reflection_tokens")
SIGNIFICANT = 0.05
PLOTTED = ("held_out", "tool_error_rate_correct")
_KEYS = ["arm", "seed", "run_id", "step"]
# Metrics in the trainer's metrics.jsonl: title, and whether the metric is a share.
TRAINER_METRICS = {"held_out": ("held-out pass@1", True), "informative_groups": ("groups that train the policy", True)}


def ablation_sums(runs: RunsLike, metrics: Sequence[str] = METRICS) -> pd.DataFrame:
    """Return one row per run and step: arm, seed, run_id, step, and the numerator and denominator of each metric.

    metrics: those in the rollup, and `eval/<set>/<name>`. held_out: mean pass@1 of the sets of `evaluate.sets`, at the steps that
    `evaluate.during.every` evaluates. informative_groups: share of groups whose kept rollouts differ in reward. tokens: tokens generated
    by the model plus tokens trained on in this step. The frame is the only input of `ablation_report`.
    Runs without a label are left out. If no run has one, the arms are the values of the recipe keys that differ between the runs.
    Raises RunStoreError if there are no arms, or a metric is not in the rollup.
    """
    runs = as_runs(runs)
    table = training_runs(runs.runs())
    labels = table.get("recipe.label", pd.Series(index=table.index, dtype=object)).fillna("")
    if (labels == "").all():
        if len(set(changes := recipe_changes(table))) < 2:
            there = ", ".join(table.run_id) or "no run"
            raise RunStoreError(f"no training run with the recipe key `label`, which names its arm; there is: {there}")
        labels = pd.Series(changes, table.index)  # of a sweep
    labels = labels[labels != ""]
    sums = []
    logged = [name for name in metrics if get_metric(name).logged]
    for name in (name for name in metrics if name not in logged):
        rolled_up = get_metric(name).rolled_up
        if rolled_up is None:
            raise RunStoreError(f"{name} is not in the rollup and cannot be part of the report")
        sums.append(f'{rolled_up[0]} AS "{name}_numerator", {rolled_up[1]} AS "{name}_denominator"')
    sums.append("model_tokens_n * coalesce(model_tokens_mean, 0) AS tokens")
    frame = runs.sql(f"SELECT run_id, step, {', '.join(sums)} FROM rollup")
    frame = frame.merge(_of_trainer(runs, logged), on=["run_id", "step"], how="left")
    frame["tokens"] += frame.pop("trained").fillna(0)
    frame = frame.merge(table[["run_id", "seed"]].join(labels.rename("arm"), how="inner"), on="run_id")
    return frame[[*_KEYS, *(name for name in frame if name not in _KEYS)]].sort_values(_KEYS, ignore_index=True)


def _of_trainer(runs: Runs, logged: Sequence[str]) -> pd.DataFrame:
    """Return run_id, step, trained (tokens) and numerator and denominator of the TRAINER_METRICS that the runs have, and of `logged`."""
    steps = runs.steps()
    sets = [name for name in steps.columns if re.fullmatch(r"eval/.+/pass1", str(name))]
    names = dict.fromkeys([*sets, *logged, "update_tokens", "groups", "equal_groups"])
    numbers = steps.reindex(columns=[*names]).apply(pd.to_numeric, errors="coerce")
    frame = steps[["run_id", "step"]].assign(trained=numbers.update_tokens)
    for name, values in {"held_out": numbers[sets].mean(axis=1), **numbers[[*logged]]}.items():
        frame[f"{name}_numerator"], frame[f"{name}_denominator"] = values, values.notna().map({True: 1.0})
    frame["informative_groups_numerator"] = numbers.groups - numbers.equal_groups
    frame["informative_groups_denominator"] = numbers.groups
    missing = [name for name in TRAINER_METRICS if frame[f"{name}_denominator"].isna().all()]
    return frame.drop(columns=[f"{name}_{part}" for name in missing for part in ("numerator", "denominator")])


def _title(metric: str) -> tuple[str, bool]:
    """Return the title of a metric, and whether it is a share."""
    return TRAINER_METRICS.get(metric) or (get_metric(metric).title, get_metric(metric).percent)


@dataclass(frozen=True)
class AblationReport:
    """Result of `ablation_report`.

    table: one row per arm and metric: arm, metric, value (mean over seeds), difference (to the control), low, high, p,
    p_holm, seeds (pairs). The rows of the control have a value only.
    """

    control: str
    steps: tuple[int, int]
    table: pd.DataFrame

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(self.table.metric))

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(self.table.arm))

    def to_markdown(self) -> str:
        """Return the table and its conclusions as Markdown."""
        rows = {(row["arm"], row["metric"]): row for row in self.table.to_dict("records")}
        cells = [[arm, *(_cell(rows[arm, name], _title(name)[1]) for name in self.metrics)] for arm in self.arms]
        lines = _markdown(["arm", *(_title(name)[0] for name in self.metrics)], cells)
        pairs = self.table.seeds[self.table.arm != self.control]
        seeds = f"{pairs.min()}" if pairs.min() == pairs.max() else f"{pairs.min()} to {pairs.max()}"
        lines += [
            "",
            f"Steps {self.steps[0]} to {self.steps[1]}, all rollouts of a step. Differences to `{self.control}`, paired by "
            f"seed ({seeds} seeds), with Student's 95% interval. Bold: Holm-corrected p below {SIGNIFICANT:g} over "
            f"{int(self.table.p.notna().sum())} comparisons.",
            "",
            *self.conclusions(),
        ]
        return "\n".join(lines) + "\n"

    def conclusions(self) -> list[str]:
        """Return a sentence per metric in which arms differ from the control after the correction, and one on the others."""
        sentences, equal = [], []
        for name in self.metrics:
            rows = self.table[(self.table.metric == name) & (self.table.arm != self.control)]
            if rows.difference.isna().all():
                continue
            found = rows[rows.p_holm < SIGNIFICANT]
            parts = [
                f"{word} in " + ", ".join(f"`{arm}`" for arm in chosen.arm)
                for word, chosen in (("lower", found[found.difference < 0]), ("higher", found[found.difference > 0]))
                if len(chosen)
            ]
            if parts:
                sentences.append(f"- {_title(name)[0]}, compared with `{self.control}`: {'; '.join(parts)}.")
            else:
                equal.append(_title(name)[0])
        if equal:
            sentences.append(f"- No arm differs significantly from `{self.control}` in {', '.join(equal)}.")
        return sentences


def ablation_report(sums: pd.DataFrame, *, control: str, arms: Sequence[str] | None = None) -> AblationReport:
    """Compare the arms of `ablation_sums` with the control over the last third of the steps.

    arms: order of the rows; default: the control first, then by name. A seed without a run of the control is left out.
    Raises RunStoreError if the control is missing, an arm has two runs of one seed, or runs differ in their last step.
    """
    known_labels = sorted(set(sums.arm))
    if control not in known_labels:
        raise RunStoreError(f"no run has the label {control!r}; the labels are {', '.join(known_labels)}")
    order = list(arms) if arms else [control, *(arm for arm in known_labels if arm != control)]
    if unknown := [arm for arm in order if arm not in known_labels]:
        raise RunStoreError(f"no run has the label {unknown[0]!r}; the labels are {', '.join(known_labels)}")
    sums = sums[sums.arm.isin(order)]
    ends = sums.groupby("run_id").step.max()
    if ends.nunique() > 1:
        raise RunStoreError(
            f"run {ends.idxmin()} ends at step {ends.min()} and run {ends.idxmax()} at step {ends.max()}: finish all runs"
        )
    last = int(ends.max())
    first = last - max(1, round(last / 3)) + 1
    late = sums[sums.step >= first].drop(columns=["step", "tokens"], errors="ignore")
    totals = late.groupby(["arm", "seed", "run_id"]).sum(min_count=1).reset_index()
    if (doubled := totals.duplicated(["arm", "seed"])).any():
        twice = totals[doubled].iloc[0]
        raise RunStoreError(f"arm {twice.arm!r} has two runs of seed {twice.seed}: choose the runs of one grid")
    totals = totals.set_index(["arm", "seed"])
    rows = []
    suffix = "_numerator"
    for name in [str(column).removesuffix(suffix) for column in totals.columns if str(column).endswith(suffix)]:
        values = (totals[f"{name}_numerator"] / totals[f"{name}_denominator"].where(lambda size: size > 0)).dropna()
        of_control = values.get(control, pd.Series(dtype=float))
        for arm in order:
            of_arm = values.get(arm, pd.Series(dtype=float))
            row: dict[str, Any] = {"arm": arm, "metric": name, "value": of_arm.mean(), "seeds": len(of_arm)}
            if arm != control:
                paired = (of_arm - of_control).dropna().to_numpy(float)
                row |= zip(("difference", "low", "high", "p"), mean_interval(paired), strict=True)
                row["seeds"] = len(paired)
            rows.append(row)
    table = pd.DataFrame(rows, columns=["arm", "metric", "value", "difference", "low", "high", "p", "seeds"])
    table["p_holm"] = holm(list(table.p.astype(float)))
    table["arm"] = pd.Categorical(table.arm, order)
    table = table.sort_values("arm", kind="stable", ignore_index=True).astype({"arm": str})
    return AblationReport(control, (first, last), table)


def load_sums(source: str | Path) -> pd.DataFrame:
    """Return the sums of a Parquet file written from `ablation_sums`. Raises RunStoreError for another file."""
    try:
        frame = pd.read_parquet(source)
    except (OSError, ValueError) as error:
        raise RunStoreError(f"{source} cannot be read as Parquet: {str(error).splitlines()[0]}") from error
    if missing := set(_KEYS) - set(frame.columns):
        raise RunStoreError(
            f"{source} has no column {sorted(missing)[0]!r}; expected a file written with `--save-data`"
        )
    return frame


def plot_frontier(sums: pd.DataFrame, arms: Sequence[str] | None = None) -> Figure:
    """Plot held-out pass@1 and the tool-error rate of correct trajectories over tokens generated and trained on.

    One point per evaluation of `ablation_sums`; the error rate is that of the steps since the previous evaluation. Mean over
    seeds with Student's 95% interval. arms: default: all.
    Raises RunStoreError if the runs have no held-out evaluations.
    """
    require_held_out(sums)
    rows = []
    for (arm, seed), run in sums.sort_values("step").groupby(["arm", "seed"], sort=False):
        tokens = run.tokens.cumsum()
        since = run.step.where(run.held_out_denominator > 0).bfill()  # the next evaluation
        for step, part in run.groupby(since):
            # Without a correct trajectory, a share in correct trajectories is missing.
            sizes = part[[f"{name}_denominator" for name in PLOTTED]].sum().replace(0, np.nan)
            values = {name: part[f"{name}_numerator"].sum() / sizes[f"{name}_denominator"] for name in PLOTTED}
            rows.append({"arm": arm, "seed": seed, "step": step, "tokens": tokens[part.index[-1]]} | values)
    frame = pd.DataFrame(rows)
    order = list(arms) if arms else list(dict.fromkeys(sums.arm))
    figure = plot_lines(frame, "arm", order, "step", "tokens", "%{x:,.0f} tokens")
    figure.update_xaxes(title_text="tokens generated and trained on", tickformat="~s")
    return Figure(figure, frame)


def require_held_out(sums: pd.DataFrame) -> None:
    """Raise RunStoreError if the runs have no held-out evaluations."""
    if "held_out_numerator" not in sums:
        raise RunStoreError("the runs were not evaluated during training: set evaluate.during.every and evaluate.sets")


def plot_lines(frame: pd.DataFrame, lines: str, order: Sequence[str], by: str, x: str, hover: str) -> go.Figure:
    """Plot each metric of PLOTTED in a panel, with one line per value of the column `lines`.

    A point is the mean of the rows with equal `by`, with Student's 95% interval, at the mean of `x`. hover: format of x in
    the tooltip.
    """
    panels = [mean_panel(_title(name)[0], frame, name, line=lines, by=by, x=x) for name in PLOTTED]
    return draw_panels(panels, x=x, hover=f"%{{y:.1%}} at {hover}", order=order)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def _cell(row: dict, percent: bool) -> str:
    if np.isnan(row["value"]):
        return "–"
    value = f"{row['value']:.1%}" if percent else f"{row['value']:.3g}"
    if np.isnan(row["difference"]):
        return value
    text = format_difference(value, row["difference"], row["low"], row["high"], percent)
    return f"**{value}**{text.removeprefix(value)}" if row["p_holm"] < SIGNIFICANT else text


def learning_curves(runs: RunsLike) -> pd.DataFrame:
    """Return one row per run and evaluation: arm, seed, step, tokens (trained so far), seconds (of the steps so far, without the
    evaluations), pass1 (of the set `held_out`). Raises UserError if no run was evaluated on it during training."""
    runs, column = as_runs(runs), "eval/held_out/pass1"
    table, steps = runs.runs(), runs.steps().sort_values(["run_id", "step"])
    if column not in steps:
        raise UserError(f"{runs.path}: no run has evaluations of 'held_out'; train with evaluate.during.every")
    zero, labels = pd.Series(0, steps.index), table.get("recipe.label", pd.Series("", table.index))
    steps["seconds"] = steps.step_s - steps.get("evaluate_s", zero).fillna(0)
    steps["tokens"] = steps.get("update_tokens", zero).fillna(0)  # missing if no step had an update
    steps[["seconds", "tokens"]] = steps.groupby("run_id")[["seconds", "tokens"]].cumsum()
    table["arm"] = labels.where(labels.fillna("") != "", table.run_id)
    frame = steps.rename(columns={column: "pass1"}).merge(table[["run_id", "arm", "seed"]], on="run_id")
    frame = frame[frame.pass1.notna()]
    return frame[["arm", "seed", "step", "tokens", "seconds", "pass1"]].reset_index(drop=True)


@dataclass(frozen=True)
class LearningTable:
    """Result of `learning_table`. table: one row per arm: pass1_tokens, pass1_seconds (means over seeds), and for each the difference to
    the control with its interval: difference_*, low_*, high_*; seeds (pairs); speed (trained tokens per second, relative to the control).
    """

    control: str
    at_tokens: float
    at_seconds: float
    table: pd.DataFrame

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        head = ["arm", "seeds", "trained tokens per second", "pass@1 at equal trained tokens", "pass@1 at equal time"]
        rows = []
        for row in self.table.to_dict("records"):
            cells = [str(row["arm"]), str(row["seeds"]), "-" if np.isnan(row["speed"]) else f"{row['speed']:.2f}x"]
            for at in ("tokens", "seconds"):
                text = f"{row[f'pass1_{at}']:.1%}"
                if row["arm"] != self.control:
                    difference, low, high = (row[f"{name}_{at}"] for name in ("difference", "low", "high"))
                    text = format_difference(text, difference, low, high, percent=True)
                cells.append(text)
            rows.append(cells)
        lines = [
            *_markdown(head, rows),
            "",
            f"Held-out pass@1 after {self.at_tokens:,.0f} trained tokens and after {self.at_seconds:.0f} s of training, interpolated "
            f"between evaluations. Differences to `{self.control}` in points, paired by seed, with Student's 95% interval.",
        ]
        return "\n".join(lines) + "\n"


def learning_table(curves: pd.DataFrame, control: str = "sync") -> LearningTable:
    """Compare the arms of `learning_curves` with a control.

    The comparison is made at the largest numbers of tokens and of seconds that every run of the control reached. A run that
    ended earlier counts with its last evaluation. The row of an arm uses the seeds that it has in common with the control;
    an arm without a common seed has no row.
    Raises UserError if the control is missing.
    """
    if control not in set(curves.arm):
        raise UserError(f"no arm {control!r}; there are: {', '.join(sorted(set(curves.arm)))}")
    runs = {key: frame.sort_values("step") for key, frame in curves.groupby(["arm", "seed"])}
    controls = [frame for (arm, _), frame in runs.items() if arm == control]
    at = {name: float(min(frame[name].iloc[-1] for frame in controls)) for name in ("tokens", "seconds")}
    values = pd.DataFrame(
        {
            key: {name: np.interp(at[name], frame[name], frame.pass1) for name in at}
            | {"speed": frame.tokens.iloc[-1] / frame.seconds.iloc[-1]}
            for key, frame in runs.items()
        }
    ).T
    of_control, rows = values.loc[control], []
    for arm in dict.fromkeys([control, *curves.arm]):
        seeds = values.loc[arm].index.intersection(of_control.index)
        if seeds.empty:
            continue
        of_arm, paired = values.loc[arm].loc[seeds], of_control.loc[seeds]
        speed = (of_arm.speed / paired.speed.replace(0, np.nan)).mean(skipna=False)
        row = {"arm": arm, "seeds": len(seeds), "speed": speed}
        for name in at:
            mean, low, high, _ = mean_interval((of_arm[name] - paired[name]).to_numpy(float))
            row |= {f"pass1_{name}": of_arm[name].mean(), f"difference_{name}": mean}
            row |= {f"low_{name}": low, f"high_{name}": high}
        rows.append(row)
    return LearningTable(control, at["tokens"], at["seconds"], pd.DataFrame(rows))


def plot_learning(curves: pd.DataFrame, x: str = "tokens") -> Figure:
    """Plot held-out pass@1 of each arm over `tokens` or `seconds`: mean over seeds with Student's 95% interval."""
    titles = {"tokens": "trained tokens", "seconds": "seconds of training"}
    panel = mean_panel("held-out pass@1", curves, "pass1", line="arm", by="step", x=x)
    order = list(dict.fromkeys(curves.arm))
    figure = draw_panels([panel], x=titles[x], hover="%{y:.1%} at %{x:,.0f}", order=order)
    return Figure(figure, curves)
