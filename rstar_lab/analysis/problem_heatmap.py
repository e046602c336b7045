"""Heat map of the pass rate of each problem at each step of a run."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.filters import Where
from rstar_lab.analysis.queries import HAS_RESULT
from rstar_lab.analysis.runs import RunsLike, as_runs, named_rows
from rstar_lab.runs import RunStoreError
from rstar_lab.untrusted.text import counted, escaped

_MAX_NAMES = 40  # maximum number of rows with a label on the axis
_RATE = f"avg((reward > 0)::INT) FILTER (WHERE {HAS_RESULT})"


def plot_heatmap(runs: RunsLike, run_id: str, *, problems: int = 100) -> Figure:
    """Plot problems by steps. The colour is the pass rate of the problem's group: the share of rollouts with a reward above 0.

    The easiest problems, by the mean over their rollouts, are at the top. A step without rollouts of the problem is blank. If
    no problem occurs in two steps, the groups of each step are sorted by pass rate instead. A click on a cell lists its group
    in a linked inspector.

    problems: maximum number of rows. If the run has more problems, those that occur in the most steps are drawn; if a step
    has more sorted groups, they are a sample spaced evenly.
    `Figure.frame` has one row per cell: problem_id, step, n (rollouts), pass_rate, kept (rollouts that RoC kept), row
    (0: bottom).
    Raises RunStoreError if the run has no rollouts with a problem id, and ValueError if problems is not positive.
    """
    runs = as_runs(runs)
    if problems < 1:
        raise ValueError(f"problems must be at least 1, got {problems}")
    cells = runs.sql(
        f"""SELECT problem_id, step, count(*) AS n, avg((reward > 0)::INT) AS pass_rate, sum(kept::INT)::INT AS kept
           FROM trajectories WHERE run_id = ? AND problem_id IS NOT NULL AND reward IS NOT NULL AND {HAS_RESULT} GROUP BY ALL""",
        [run_id],
    )
    if cells.empty:
        raise RunStoreError(f"run {run_id} has no rollouts with a problem id and a reward")
    recurring = bool(cells.problem_id.duplicated().any())
    frame, names = _rows_by_problem(cells, problems) if recurring else _rows_by_rank(cells, problems)
    frame = frame.sort_values(["row", "step"], ignore_index=True)

    steps = sorted(frame.step.unique())
    shape = (len(names), len(steps))
    rate, where, text = np.full(shape, None, object), np.full(shape, None, object), np.full(shape, "", object)
    where[...] = [[{"any": []}]]  # an empty cell has no rollouts
    for cell in named_rows(frame):
        place, share = (cell.row, steps.index(cell.step)), f"{cell.pass_rate:.0%} of {cell.n} rollouts"
        rate[place] = cell.pass_rate
        where[place] = {"run_id": run_id, "step": int(cell.step), "problem_id": cell.problem_id}
        text[place] = f"{escaped(cell.problem_id)}, step {cell.step}<br>{share}"
    figure = go.Figure(
        go.Heatmap(
            z=rate.tolist(), x=[str(step) for step in steps], y=list(map(escaped, names)), customdata=where.tolist(), text=text.tolist(),
            colorscale="Cividis", zmin=0, zmax=1, colorbar={"title": "pass rate", "tickformat": ".0%"},
            hovertemplate="%{text}<extra></extra>", hoverongaps=False, xgap=1, ygap=1,
        )
    )  # fmt: skip
    figure.update_xaxes(title="step", type="category", showgrid=False)
    figure.update_yaxes(type="category", showgrid=False)
    if not recurring or len(names) > _MAX_NAMES:
        title = "problems by pass rate" if recurring else "groups of the step by pass rate"
        figure.update_yaxes(title=title, showticklabels=False, ticks="")
    count, total = frame.problem_id.nunique(), cells.problem_id.nunique()
    of = counted(count, "problem") if count == total else f"{count:,} of {total:,} problems"
    title = f"{escaped(run_id)}: {of}, {counted(len(steps), 'step')}"
    figure.update_layout(height=min(900, max(320, 200 + 18 * len(names))), title=title)
    return Figure(figure, frame)


def _rows_by_problem(cells: pd.DataFrame, limit: int) -> tuple[pd.DataFrame, list[str]]:
    """Return the cells with their row, and the names of the rows: one row per problem."""
    sums = cells.assign(solved=cells.pass_rate * cells.n).groupby("problem_id")
    table = sums.agg(steps=("step", "size"), n=("n", "sum"), solved=("solved", "sum"))
    table["pass_rate"] = table.solved / table.n
    table = table.sort_values("steps", ascending=False, kind="stable").head(limit)
    order = list(table.sort_values("pass_rate", kind="stable").index)
    row = cells.problem_id.map({problem_id: row for row, problem_id in enumerate(order)})
    return cells.assign(row=row).dropna(subset="row").astype({"row": int}), order


def _rows_by_rank(cells: pd.DataFrame, limit: int) -> tuple[pd.DataFrame, list[str]]:
    """Return the cells with their row, and the names of the rows: one row per rank within a step."""
    groups = cells.sort_values(["step", "pass_rate", "problem_id"]).groupby("step")
    rank, size = groups.cumcount(), groups.step.transform("size")
    row = rank * limit // np.maximum(size, limit) if size.max() > limit else rank
    ranked = cells.assign(row=row).sort_values("problem_id").drop_duplicates(["step", "row"])
    return ranked, [str(name + 1) for name in range(ranked.row.max() + 1)]


def problem_table(runs: RunsLike, where: Where = None) -> pd.DataFrame:
    """Return one row per problem: runs, rollouts, pass_rate, first_rate and last_rate (of its first and last step), change."""
    runs = as_runs(runs)
    condition = runs.condition(where)
    frame = runs.sql(
        f"""SELECT problem_id, count(DISTINCT run_id) AS runs, count(*) AS rollouts, {_RATE} AS pass_rate,
                   arg_min(rate, step) AS first_rate, arg_max(rate, step) AS last_rate
            FROM (SELECT *, {_RATE} OVER (PARTITION BY problem_id, step) AS rate
                  FROM trajectories WHERE {condition})
            GROUP BY problem_id ORDER BY problem_id"""
    )
    frame["change"] = frame.last_rate - frame.first_rate
    return frame
