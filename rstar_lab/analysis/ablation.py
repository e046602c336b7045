"""The ablation table: arms compared with a control, paired by seed, from the rollups of their runs.

An arm is the set of runs that share the recipe key `label`; each has its own seed. The value of a metric for a run is
the ratio of its sums over the last steps. Differences to the control are paired by seed, with Student's 95% interval
over the seeds and p values corrected for all comparisons of the table (Holm 1979).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rstar_lab.analysis.metrics import get_metric
from rstar_lab.analysis.runs import Runs
from rstar_lab.analysis.student import holm, mean_interval
from rstar_lab.runs import RunStoreError

METRICS = ("pass1", "tool_error_rate_correct", "duplicate_answers", "response_tokens", "reflection_tokens")
SIGNIFICANT = 0.05
_KEYS = ["arm", "seed", "run_id", "step"]


def ablation_sums(runs: Runs, metrics: Sequence[str] = METRICS) -> pd.DataFrame:
    """Return one row per run and step: arm, seed, run_id, step and numerator and denominator of each metric.

    This is all that `ablation_report` needs, and small enough to be committed as a Parquet file.
    Raises RunStoreError if a run has no label or a metric is not in the rollup.
    """
    table = runs.runs()
    labels = table.get("recipe.label", pd.Series(index=table.index, dtype=object))
    if table.empty or (labels.fillna("") == "").any():
        missing = table.run_id[labels.fillna("") == ""]
        raise RunStoreError(f"run {next(iter(missing), runs.path)} has no recipe key `label`, which names its arm")
    sums = []
    for name in metrics:
        rolled_up = get_metric(name).rolled_up
        if rolled_up is None:
            raise RunStoreError(f"{name} is not in the rollup and cannot be part of the report")
        sums.append(f'{rolled_up[0]} AS "{name}_numerator", {rolled_up[1]} AS "{name}_denominator"')
    frame = runs.sql(f"SELECT run_id, step, {', '.join(sums)} FROM rollup")
    arms = pd.DataFrame({"run_id": table.run_id, "arm": labels, "seed": table.seed})
    frame = frame.merge(arms, on="run_id")
    return frame[[*_KEYS, *(name for name in frame if name not in _KEYS)]].sort_values(_KEYS, ignore_index=True)


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
        lines = ["| arm | " + " | ".join(get_metric(name).title for name in self.metrics) + " |"]
        lines.append("|---" * (len(self.metrics) + 1) + "|")
        for arm in self.arms:
            cells = [_cell(rows[arm, name], get_metric(name).percent) for name in self.metrics]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
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
        """Return one sentence per metric: which arms differ from the control after the correction."""
        sentences = []
        for name in self.metrics:
            rows = self.table[(self.table.metric == name) & (self.table.arm != self.control)]
            if rows.difference.isna().all():
                continue
            parts = []
            for word, chosen in (
                ("lower", rows[(rows.p_holm < SIGNIFICANT) & (rows.difference < 0)]),
                ("higher", rows[(rows.p_holm < SIGNIFICANT) & (rows.difference > 0)]),
            ):
                if len(chosen):
                    parts.append(f"{word} in {', '.join(chosen.arm)}")
            rest = rows[~(rows.p_holm < SIGNIFICANT)]
            if len(rest):
                parts.append(f"no difference shown for {', '.join(rest.arm)}")
            sentences.append(f"- {get_metric(name).title} against {self.control}: {'; '.join(parts)}.")
        return sentences


def ablation_report(
    sums: pd.DataFrame, *, control: str, last_share: float = 1 / 3, arms: Sequence[str] | None = None
) -> AblationReport:
    """Compare the arms of `ablation_sums` with the control over the last share of the steps.

    arms: order of the rows; default: the control first, then by name. A seed without a run of the control is left out.
    Raises RunStoreError if the control is missing, an arm has two runs of one seed, or runs differ in their last step.
    """
    known = sorted(set(sums.arm))
    if control not in known:
        raise RunStoreError(f"no run has the label {control!r}; the labels are {', '.join(known)}")
    if not 0 < last_share <= 1:
        raise RunStoreError(f"last_share must be above 0 and at most 1, got {last_share:g}")
    order = list(arms) if arms else [control, *(arm for arm in known if arm != control)]
    if unknown := [arm for arm in order if arm not in known]:
        raise RunStoreError(f"no run has the label {unknown[0]!r}; the labels are {', '.join(known)}")
    sums = sums[sums.arm.isin(order)]
    ends = sums.groupby("run_id").step.max()
    if ends.nunique() > 1:
        raise RunStoreError(
            f"run {ends.idxmin()} ends at step {ends.min()} and run {ends.idxmax()} at step {ends.max()}: finish all runs"
        )
    last = int(ends.max())
    first = last - max(1, round(last * last_share)) + 1
    late = sums[sums.step >= first]
    totals = late.drop(columns="step").groupby(["arm", "seed", "run_id"]).sum(min_count=1).reset_index()
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
                differences = (of_arm - of_control).dropna()
                ends_and_p = dict(
                    zip(("difference", "low", "high", "p"), mean_interval(differences.to_numpy(float)), strict=True)
                )
                row |= {"seeds": len(differences), **ends_and_p}
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
        raise RunStoreError(f"{source} has no column {sorted(missing)[0]!r}; expected a file of `--save-data`")
    return frame


def _cell(row: dict, percent: bool) -> str:
    if np.isnan(row["value"]):
        return "–"
    value = f"{row['value']:.1%}" if percent else f"{row['value']:.3g}"
    if np.isnan(row["difference"]):
        return value
    scale = 100 if percent else 1
    text = f"{scale * row['difference']:+.1f}" if percent else f"{row['difference']:+.2g}"
    if not np.isnan(row["low"]):
        low, high = (f"{scale * row[side]:+.1f}" if percent else f"{row[side]:+.2g}" for side in ("low", "high"))
        text += f" [{low}, {high}]"
    return f"**{value}**, {text}" if row["p_holm"] < SIGNIFICANT else f"{value}, {text}"
