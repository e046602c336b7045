"""History of one problem over steps and runs: when it was solved or forgotten, and how its code changed."""

import difflib
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.filters import Where
from rstar_lab.analysis.metrics import SOLVED
from rstar_lab.analysis.runs import Runs, named_rows
from rstar_lab.runs import RunStoreError
from rstar_lab.visible_text import escaped


@dataclass(frozen=True)
class ProblemHistory:
    """History of one problem. Result of `problem_history`.

    strip: one row per run and step: run_id, stage, step, n, pass_rate, kept, error_rate, response_tokens, traj_id (a correct
    rollout if there is one). events: run_id, step, event (first solve, solved, forgotten), traj_id.
    code: one row per run, step and program: run_id, step, code_hash, calls, new (first use in this run), traj_id.
    """

    problem_id: str
    question: str | None
    truth: str | None
    strip: pd.DataFrame
    events: pd.DataFrame
    code: pd.DataFrame

    def plot(self) -> Figure:
        """Plot the pass rate by step, one row per run. A click on a cell selects its rollouts."""
        wide = self.strip.pivot(index="run_id", columns="step", values="pass_rate")
        problem = self.problem_id.replace("'", "''")
        conditions = [
            [f"run_id = '{run_id}' AND step = {step} AND problem_id = '{problem}'" for step in wide.columns]
            for run_id in wide.index
        ]
        figure = go.Figure(
            go.Heatmap(
                z=wide.to_numpy(),
                x=[str(step) for step in wide.columns],
                y=wide.index,
                customdata=conditions,
                colorscale="Cividis",
                zmin=0,
                zmax=1,
                colorbar={"title": "pass rate", "tickformat": ".0%"},
                hovertemplate="%{y}, step %{x}: %{z:.0%}<extra></extra>",
                xgap=1,
                ygap=2,
            )
        )
        first = self.events[self.events.event == "first solve"]
        figure.add_scatter(
            x=[str(step) for step in first.step],
            y=first.run_id,
            mode="markers",
            name="first solve",
            marker={"symbol": "star", "size": 11, "color": "#D55E00", "line": {"color": "white", "width": 1}},
            hovertemplate="%{y}: first solved at step %{x}<extra></extra>",
        )
        figure.update_xaxes(title="step", type="category")
        figure.update_layout(height=max(240, 120 + 36 * len(wide)), title=f"problem {escaped(self.problem_id)}")
        return Figure(figure, self.strip)


def problem_history(runs: Runs, problem_id: str, where: Where = None) -> ProblemHistory:
    """Return the history of one problem. where: condition on runs and steps. Raises RunStoreError if it has no rollouts."""
    condition = runs.condition(where)
    rows = runs.sql(
        f"""SELECT run_id, stage, step, traj_id, reward, kept, errors, calls, response_tokens, truth FROM trajectories
            WHERE problem_id = ? AND {condition} ORDER BY run_id, step, traj_id""",
        [problem_id],
    )
    if rows.empty:
        raise RunStoreError(f"no rollout of problem {problem_id!r} in {runs.path}")
    rows["solved"] = rows.reward > 0
    grouped = rows.groupby(["run_id", "stage", "step"], as_index=False)
    strip = grouped.agg(
        n=("traj_id", "size"),
        pass_rate=("solved", "mean"),
        kept=("kept", "sum"),
        errors=("errors", "sum"),
        calls=("calls", "sum"),
        response_tokens=("response_tokens", "mean"),
    )
    strip["error_rate"] = strip.errors / strip.calls.where(strip.calls > 0)
    ordered = rows.sort_values(["solved", "traj_id"], ascending=[False, True], kind="stable")
    best = ordered.groupby(["run_id", "step"]).traj_id.first()
    strip["traj_id"] = [best[(row.run_id, row.step)] for row in named_rows(strip)]
    strip = strip.drop(columns=["errors", "calls"]).sort_values(["run_id", "step"], ignore_index=True)
    question = None
    try:
        question = runs.transcript(strip.traj_id.iloc[-1]).attrs["question"]
    except RunStoreError:  # the run stored no transcripts
        pass
    return ProblemHistory(problem_id, question, rows.truth.iloc[0], strip, _events(strip), _code(runs, rows))


def _events(strip: pd.DataFrame) -> pd.DataFrame:
    events = []
    for run_id, steps in strip.groupby("run_id", sort=True):
        solved_before, ever_solved = False, False
        for row in named_rows(steps):
            if row.pass_rate > 0 and not ever_solved:
                ever_solved = True
                events.append((run_id, row.step, "first solve", row.traj_id))
            solved = row.pass_rate >= SOLVED
            if solved != solved_before:
                events.append((run_id, row.step, "solved" if solved else "forgotten", row.traj_id))
            solved_before = solved
    return pd.DataFrame(events, columns=["run_id", "step", "event", "traj_id"])


def _code(runs: Runs, rows: pd.DataFrame) -> pd.DataFrame:
    """Return which programs ran at which step. Empty if the runs stored no calls."""
    columns = ["run_id", "step", "code_hash", "calls", "new", "traj_id"]
    marks = ", ".join("?" * len(rows))
    try:
        programs = runs.sql(
            f"""SELECT run_id, step, code_hash, count(*) AS calls, min(traj_id) AS traj_id FROM calls
                WHERE traj_id IN ({marks}) AND code_hash IS NOT NULL GROUP BY ALL ORDER BY ALL""",
            list(rows.traj_id),
        )
    except RunStoreError:
        return pd.DataFrame(columns=columns)
    programs["new"] = programs.step == programs.groupby(["run_id", "code_hash"]).step.transform("min")
    return programs[columns]


def compare_transcripts(runs: Runs, traj_a: str, traj_b: str) -> str:
    """Return two transcripts side by side as HTML. Differences are marked by colour and by + and -."""
    sides = [_lines(runs.transcript(traj_id)) for traj_id in (traj_a, traj_b)]
    matcher = difflib.SequenceMatcher(a=sides[0], b=sides[1], autojunk=False)
    rows = []
    for tag, a1, a2, b1, b2 in matcher.get_opcodes():
        left, right = sides[0][a1:a2], sides[1][b1:b2]
        for number in range(max(len(left), len(right))):
            cells = [side[number] if number < len(side) else None for side in (left, right)]
            rows.append("<tr>" + _cell(cells[0], tag, "-") + _cell(cells[1], tag, "+") + "</tr>")
    head = "".join(f"<th scope='col'>{escaped(traj_id)}</th>" for traj_id in (traj_a, traj_b))
    return f"<table style='width:100%;table-layout:fixed'><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _lines(messages: pd.DataFrame) -> list[str]:
    lines = []
    for row in named_rows(messages):
        outcome = f" ({row.outcome})" if isinstance(row.outcome, str) else ""
        lines.append(f"[{row.role}{outcome}]")
        lines += str(row.content).splitlines()
    return lines


def _cell(text: str | None, tag: str, sign: str) -> str:
    colour = {"-": "#fbe3d6", "+": "#d9ebf7"}[sign] if tag != "equal" and text is not None else "transparent"
    mark = f"{sign} " if tag != "equal" and text is not None else ""
    style = f"background:{colour};color:{'#1b1b1b' if mark else 'inherit'};white-space:pre-wrap;overflow-wrap:anywhere"
    return f"<td style='{style};vertical-align:top;font-family:monospace;text-align:left'>{escaped(mark + (text or ''))}</td>"


def problem_table(runs: Runs, where: Where = None) -> pd.DataFrame:
    """Return one row per problem: runs, rollouts, pass_rate, first_rate and last_rate (of its first and last step), change."""
    condition = runs.condition(where)
    frame = runs.sql(
        f"""SELECT problem_id, count(DISTINCT run_id) AS runs, count(*) AS rollouts, avg((reward > 0)::INT) AS pass_rate,
                   arg_min(rate, step) AS first_rate, arg_max(rate, step) AS last_rate
            FROM (SELECT *, avg((reward > 0)::INT) OVER (PARTITION BY problem_id, step) AS rate
                  FROM trajectories WHERE {condition})
            GROUP BY problem_id ORDER BY problem_id""",
    )
    frame["change"] = frame.last_rate - frame.first_rate
    return frame
