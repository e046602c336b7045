"""Paired comparison of two sets of runs on the same problems, shown as a card in a notebook."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from rstar_lab.analysis.filters import Where, sql_list
from rstar_lab.analysis.metrics import SOLVED, Metric, get_metric, sum_by_problem
from rstar_lab.analysis.queries import HAS_RESULT
from rstar_lab.analysis.runs import Runs, RunsLike, as_runs, named_rows
from rstar_lab.analysis.tables import format_value, html_table
from rstar_lab.common.estimates import Side, paired_difference
from rstar_lab.runs import RunStoreError
from rstar_lab.untrusted.text import Html, counted, html, joined

DEFAULT_METRICS = (
    "pass1", "tool_error_rate", "tool_error_rate_correct", "response_tokens", "response_tokens_correct", "calls",
    "turns", "truncation_rate", "duplicate_answers", "reflection_tokens", "entropy",
)  # fmt: skip
FEW_PROBLEMS = 20  # below, `compare` says that only large differences can be shown


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`. A notebook shows it as a card; an inspector on the page opens the linked trajectories.

    table: one row per metric: a, b, difference (b - a), low, high, n, problems, conclusion.
    flips: one row per problem that only one side solves: problem_id, flip (won or lost by b), pass rates, and a trajectory
    of each side. sentence: summary of the first metric, with what the interval covers.
    """

    name_a: str
    name_b: str
    table: pd.DataFrame
    flips: pd.DataFrame
    sentence: str

    def _repr_html_(self) -> Html:
        rows = [
            (row.title, format_value(row.a, row.percent), format_value(row.b, row.percent), _interval(row), row.problems, row.conclusion)
            for row in named_rows(self.table)
        ]  # fmt: skip
        names = ["metric", self.name_a, self.name_b, "difference [95%]", "problems", "conclusion"]
        table = html_table(pd.DataFrame(rows).set_axis(names, axis=1))
        flips = joined(
            html(
                "<li>{}: {} ({} to {}): {} and {}</li>",
                row.flip, row.problem_id, f"{row.pass_a:.0%}", f"{row.pass_b:.0%}", _link(row.traj_a), _link(row.traj_b),
            )
            for row in named_rows(self.flips.head(20))
        )  # fmt: skip
        won = int((self.flips.flip == "won").sum())
        return html(
            "<div><p><b>{}</b> against <b>{}</b>. {}</p>{}<details><summary>{} won, {} lost</summary><ul>{}</ul></details></div>",
            self.name_b, self.name_a, self.sentence, table, counted(won, "problem"), len(self.flips) - won, flips,
        )  # fmt: skip


def _link(traj_id: str | None) -> Html:
    """Return a link that an inspector on the same page opens."""
    return html('<a href="#rstar={}"><code>{}</code></a>', quote(str(traj_id), safe=""), traj_id)


def compare(
    runs_a: RunsLike,
    runs_b: RunsLike,
    metrics: Sequence[str] = DEFAULT_METRICS,
    *,
    where: Where = None,
    name_a: str | None = None,
    name_b: str | None = None,
) -> Comparison:
    """Compare b with a on the problems that both sampled.

    Args:
        runs_a: Runs of one side.
        runs_b: Runs of the other side.
        metrics: Metrics of the table; the sentence is about the first.
        where: A filter for both sides, such as "step > 40".
        name_a: Name in the card. Default: the run id.
        name_b: Name in the card. Default: the run id.

    Returns:
        The card. Intervals: 95%, paired over problems, and over runs if both sides have several.

    Raises:
        RunStoreError: If the sides have no problem in common.
    """
    runs_a, runs_b = as_runs(runs_a), as_runs(runs_b)
    chosen = [get_metric(name) for name in metrics]
    name_a, name_b = name_a or _name(runs_a, "a"), name_b or _name(runs_b, "b")
    sums = [sum_by_problem(runs, [get_metric("pass1"), *chosen], ("run_id",), where) for runs in (runs_a, runs_b)]
    common = sorted(set(sums[0].problem_id.dropna()) & set(sums[1].problem_id.dropna()))
    if not common:
        raise RunStoreError(f"{name_a} and {name_b} have no problem in common, so they cannot be compared")
    seeds = [side.run_id.nunique() for side in sums]
    rows = [_row(metric, sums, common, min(seeds) == 1) for metric in chosen]
    table = pd.DataFrame(rows)
    left_out = len({*sums[0].problem_id, *sums[1].problem_id}) - len(common)
    flips = _flips(runs_a, runs_b, where, sums, common)
    return Comparison(name_a, name_b, table, flips, _sentence(table, name_a, name_b, seeds, len(common), left_out))


def _row(metric: Metric, sums: list[pd.DataFrame], common: list[str], single: bool) -> dict[str, Any]:
    sides = [
        Side(
            *(
                side.pivot(index="run_id", columns="problem_id", values=f"{metric.name}_{part}").reindex(columns=common).to_numpy(float)
                for part in ("numerator", "denominator")
            )
        )
        for side in sums
    ]  # fmt: skip
    n = int(sum(side[side.problem_id.isin(common)][f"{metric.name}_n"].sum() for side in sums))
    found = paired_difference(sides[0], sides[1], n)
    both = np.logical_and(*(np.nan_to_num(side.denominator).sum(axis=0) > 0 for side in sides))
    with np.errstate(invalid="ignore"):
        a, b = (np.nansum(side.numerator[:, both]) / np.nansum(side.denominator[:, both]) for side in sides)
    return {
        "metric": metric.name, "title": metric.title, "a": a, "b": b, "difference": found.value, "low": found.low, "high": found.high,
        "n": found.n, "problems": found.clusters, "percent": metric.percent,
        "conclusion": _conclusion(found.low, found.high, metric.better, single),
    }  # fmt: skip


def _conclusion(low: float, high: float, better: int, single: bool) -> str:
    """Return whether b is better, worse, higher or lower than a, or that the interval does not show it. single: a side has one
    run, so the conclusion is about these runs and not about what produced them."""
    if np.isnan(low) or np.isnan(high):
        return "too little data"
    if low <= 0 <= high:
        return "no difference shown"
    direction = 1 if low > 0 else -1
    word = {0: "higher" if direction > 0 else "lower", direction: "better"}.get(better, "worse")
    return f"{word} in these runs" if single else word


def _flips(runs_a: Runs, runs_b: Runs, where: Where, sums: list[pd.DataFrame], common: list[str]) -> pd.DataFrame:
    rates = []
    for side in sums:
        sums_of_problem = side[side.problem_id.isin(common)].groupby("problem_id").sum(numeric_only=True)
        rates.append(sums_of_problem.pass1_numerator / sums_of_problem.pass1_denominator)
    frame = pd.DataFrame({"pass_a": rates[0], "pass_b": rates[1]}).dropna()
    changed = frame[(frame.pass_a >= SOLVED) != (frame.pass_b >= SOLVED)].copy()
    changed.insert(0, "flip", np.where(changed.pass_b >= SOLVED, "won", "lost"))
    changed = changed.rename_axis("problem_id").reset_index()
    won = changed.set_index("problem_id").flip == "won"
    changed["traj_a"] = _examples(runs_a, where, {problem: not flag for problem, flag in won.items()})
    changed["traj_b"] = _examples(runs_b, where, {problem: bool(flag) for problem, flag in won.items()})
    return changed.sort_values(["flip", "problem_id"], ascending=[False, True], ignore_index=True)


def _examples(runs: Runs, where: Where, wanted: dict) -> list[str | None]:
    """Return for each problem its newest correct (True) or incorrect (False) trajectory, or None."""
    if not wanted:
        return []
    candidates = runs.sql(
        f"""SELECT problem_id, reward > 0 AS solved, arg_max(traj_id, (step, traj_id)) AS traj_id FROM trajectories
            WHERE {runs.condition(where)} AND {HAS_RESULT} AND problem_id IN ({sql_list(wanted)}) GROUP BY ALL"""
    )
    newest = {(row.problem_id, bool(row.solved)): row.traj_id for row in named_rows(candidates.dropna())}
    return [newest.get((problem, solved)) for problem, solved in wanted.items()]


def _sentence(table: pd.DataFrame, name_a: str, name_b: str, seeds: list[int], common: int, left_out: int) -> str:
    first = table.iloc[0]
    unit = " points" if first.percent else ""
    size = f"{abs(first.difference) * (100 if first.percent else 1):.1f}{unit}"
    direction = "higher" if first.difference > 0 else "lower"
    single = min(seeds) == 1
    coverage = f"The intervals cover problems and seeds ({seeds[0]} and {seeds[1]} runs). "
    if single:
        coverage = (
            "A side has one run: the intervals cover the choice of problems, not the seeds, so that another run of the same "
            "recipe may differ by more. "
        )
    on = f"On {counted(common, 'common problem')}"
    finding = f"{on}, {first.title} of {name_b} is {size} {direction} than that of {name_a} ({_interval(first)})"
    match first.conclusion:
        case "too little data":
            finding = f"{on}, there is too little data to compare {first.title}"
        case "no difference shown":
            finding += ". The interval contains 0: the data do not show a difference"
        case _:
            finding += f": the data show a difference{' between these runs' if single else ''}"
    others = [
        f"{row.title} ({row.conclusion.removesuffix(' in these runs')})"
        for row in named_rows(table.iloc[1:])
        if row.conclusion not in ("no difference shown", "too little data")
    ]
    also = f". Also different: {', '.join(others)}" if others else ""
    few = ". With so few problems, only large differences can be shown" if common < FEW_PROBLEMS else ""
    tested = f". {len(table)} metrics were compared without correction" if len(table) > 1 else ""
    alone = f". Left out, because only one side sampled them: {counted(left_out, 'problem')}" if left_out else ""
    return f"{coverage}{finding}{also}{few}{tested}{alone}."


def _name(runs: Runs, otherwise: str) -> str:
    ids = list(runs.runs().run_id)
    return ids[0] if len(ids) == 1 else f"{otherwise} ({len(ids)} runs)"


def _interval(row: Any) -> str:
    if np.isnan(row.difference):
        return "–"
    scale, unit = (100, " pt") if row.percent else (1, "")
    text = f"{row.difference * scale:+.3g}"
    if not np.isnan(row.low):
        text += f" [{row.low * scale:+.3g}, {row.high * scale:+.3g}]"
    return text.replace("-", "−") + unit
