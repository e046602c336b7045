"""The evaluations of `rstar-lab demo` and `demo --real`, from which the numbers of README.md and docs/get-started.md are computed.

python -m benchmarks.real_demo RUNS...   # folders of runs of `demo --real`, one for each seed: writes smollm2-demo.csv
python -m benchmarks.real_demo RUNS      # folder of runs of `demo`: writes demo.csv, demo-curves.csv and the figure
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from rstar_lab.analysis import open_runs
from rstar_lab.analysis.figures import plot_curves
from rstar_lab.common.estimates import Estimate, Side, format_interval, paired_difference, ratio
from rstar_lab.common.resources import benchmark_file
from rstar_lab.runs.reader import RunReader

REAL, SMALL = "smollm2_laptop", "tiny"  # recipes of `demo --real` and of `demo`
MODELS = {"base": "before training", "sft": "after SFT", "rl": "after GRPO-RoC"}
SUMS = ["correct", "samples", "calls_in_correct", "errors_in_correct"]


def record(folders: list[Path], recipe: str = REAL) -> pd.DataFrame:
    """Return the sums of each problem: seed, model, problem, and the columns SUMS."""
    parts = []
    for folder in folders:
        seed = RunReader(folder / f"{recipe}-rl").info["recipe"].get("seed")
        for model in MODELS:
            rows = RunReader(folder / f"{recipe}-eval-{model}").read("trajectories").to_pandas()
            right = rows.reward > 0
            sums = pd.DataFrame(
                {
                    "problem": rows.problem_id, "correct": right.astype(int), "samples": 1,
                    "calls_in_correct": rows.calls.where(right, 0), "errors_in_correct": rows.errors.where(right, 0),
                }
            ).groupby("problem", as_index=False).sum()  # fmt: skip
            parts.append(sums.assign(seed=seed, model=model))
    return pd.concat(parts)[["seed", "model", "problem", *SUMS]].sort_values(["seed", "model", "problem"])


def rate(rows: pd.DataFrame) -> Estimate:
    """Return pass@1 of the rows of one model with its interval over problems; rows of several seeds are added up."""
    by_problem = rows.groupby("problem")[SUMS].sum()
    return ratio(by_problem.correct.to_numpy(), by_problem.samples.to_numpy(), int(by_problem.samples.sum()))


def gain(table: pd.DataFrame) -> Estimate:
    """Return held-out pass@1 after GRPO-RoC minus that after SFT. The interval covers problems; rows of several seeds are added up."""

    def side(model: str) -> Side:
        rows = table[table.model == model].groupby("problem")[SUMS].sum()
        return Side(rows.correct.to_numpy()[None], rows.samples.to_numpy()[None])

    before, after = side("sft"), side("rl")
    return paired_difference(before, after, int(before.denominator.sum()))


def points(estimate: Estimate) -> str:
    """Return a difference of rates as text: `14.8 points [6.9, 22.8]`."""
    return "{:.1f} points [{:.1f}, {:.1f}]".format(
        *(100 * value for value in (estimate.value, estimate.low, estimate.high))
    )


def percent(estimate: Estimate) -> str:
    """Return a rate as text: `51.6% [41.7, 61.3]`."""
    return format_interval(estimate.as_list()).replace("%,", ",").replace("%]", "]")


def held_out_table(table: pd.DataFrame) -> str:
    """Return the rows of the table of held-out problems in Markdown: one for each seed, and the mean."""
    lines = []
    for name, rows in [*((str(seed), rows) for seed, rows in table.groupby("seed")), ("mean", table)]:
        cells = [percent(rate(rows[rows.model == model])) for model in MODELS]
        lines.append(f"| {name} | {' | '.join(cells)} | {points(gain(rows))} |")
    return "\n".join(lines)


def readme_rows(table: pd.DataFrame) -> str:
    """Return the two rows of `demo` in README.md."""
    held_out = {model: table[table.model == model] for model in MODELS}
    problems, samples = held_out["rl"].problem.nunique(), held_out["rl"].samples.iloc[0]
    failed = {model: f"{np.divide(*errors(table, model)):.1%}" for model in ("sft", "rl")}
    return (
        f"| held-out pass@1 of the demo | {percent(rate(held_out['sft']))} after SFT, {percent(rate(held_out['rl']))} after GRPO-RoC "
        f"| {problems} problems, {samples} rollouts each, one seed; the interval covers the choice of problems, not another run |\n"
        f"| tool errors in correct trajectories | {failed['sft']} after SFT, {failed['rl']} after GRPO-RoC | the same rollouts |"
    )


def errors(table: pd.DataFrame, model: str) -> tuple[int, int]:
    """Return the failed calls and all calls in correct rollouts on held-out problems."""
    rows = table[table.model == model]
    return int(rows.errors_in_correct.sum()), int(rows.calls_in_correct.sum())


def record_curves(folder: Path) -> pd.DataFrame:
    """Return the data of the figure of `demo`, one row per metric and step, and write the figure."""
    figure = plot_curves(open_runs(folder, run_ids=[f"{SMALL}-rl"]))
    figure.save(Path(__file__).parents[1] / "docs" / "images" / "demo.png", width=1000, height=640)
    return figure.frame[["metric", "step", "value", "low", "high"]].round(4)


if __name__ == "__main__":
    runs = [Path(folder) for folder in sys.argv[1:]]
    if (runs[0] / f"{SMALL}-rl").is_dir():
        record(runs, SMALL).to_csv(benchmark_file("demo.csv"), index=False)
        record_curves(runs[0]).to_csv(benchmark_file("demo-curves.csv"), index=False)
    else:
        recorded = record(runs)
        recorded.to_csv(benchmark_file("smollm2-demo.csv"), index=False)
        print(held_out_table(recorded), *(errors(recorded, model) for model in MODELS), sep="\n")
