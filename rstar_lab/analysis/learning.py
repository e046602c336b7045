"""Comparison of training modes by held-out pass@1: notebook 12 and docs/async.md.

The learning table compares arms (runs with the same recipe key `label`) by held-out pass@1 at equal trained tokens and at equal
time, paired by seed, with Student's 95% interval over the seeds.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.line_panels import draw_panels, mean_panel
from rstar_lab.analysis.runs import RunsLike, as_runs
from rstar_lab.analysis.tables import format_difference
from rstar_lab.common.errors import UserError
from rstar_lab.common.estimates import mean_interval


def learning_curves(runs: RunsLike, evaluation: str = "held_out") -> pd.DataFrame:
    """Return one row per run and evaluation: arm, seed, step, tokens (trained so far), seconds (of the steps so far, without the
    evaluations), pass1.

    evaluation: name of the evaluation set, which `evaluate.during.every` evaluates. Raises UserError if no run has it.
    """
    runs = as_runs(runs)
    column = f"eval/{evaluation}/pass1"
    table, steps = runs.runs(), runs.steps().sort_values(["run_id", "step"])
    if column not in steps:
        raise UserError(f"{runs.path}: no run has evaluations of {evaluation!r}; train with evaluate.during.every")
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
    """Result of `learning_table`. table: one row per arm: pass1_tokens, pass1_seconds (means over seeds), and for each the
    difference to the control with its interval: difference_*, low_*, high_*; seeds (pairs); speed (trained tokens per second,
    relative to the control; NaN if a run of the control trained no token)."""

    control: str
    at_tokens: float
    at_seconds: float
    table: pd.DataFrame

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [
            "| arm | seeds | trained tokens per second | pass@1 at equal trained tokens | pass@1 at equal time |",
            "|---|---|---|---|---|",
        ]
        for row in self.table.to_dict("records"):
            cells = [str(row["arm"]), str(row["seeds"]), "-" if np.isnan(row["speed"]) else f"{row['speed']:.2f}x"]
            for at in ("tokens", "seconds"):
                text = f"{row[f'pass1_{at}']:.1%}"
                if row["arm"] != self.control:
                    difference, low, high = (row[f"{name}_{at}"] for name in ("difference", "low", "high"))
                    text = format_difference(text, difference, low, high, percent=True)
                cells.append(text)
            lines.append(f"| {' | '.join(cells)} |")
        lines += [
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
    figure = draw_panels([panel], x=titles[x], hover="%{y:.1%} at %{x:,.0f}", order=order, opacity=0.12)
    return Figure(figure, curves)
