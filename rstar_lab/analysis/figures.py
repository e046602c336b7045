"""Figures of runs: curves with bands over seeds or problems, ablations, outcomes of tool calls, lengths, pass@k.

`Figure.where` returns the filter of the rollouts behind a point; `Figure.frame` holds the plotted values.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from rstar_lab.analysis import paper
from rstar_lab.analysis.alerts import find_alerts
from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figure_theme import COLOURS, line_styles, outcome_marker
from rstar_lab.analysis.filters import Where, narrowed, selects_steps
from rstar_lab.analysis.line_panels import Panel, band, draw_panels, panel_place
from rstar_lab.analysis.metrics import curves, evaluations, get_metric, measure, pass_at_k
from rstar_lab.analysis.runs import Runs, RunsLike, as_runs, training_runs
from rstar_lab.common.estimates import mean_interval
from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.runs import RunStoreError
from rstar_lab.untrusted.text import escaped, html

DEFAULT_METRICS = ("pass1", "tool_error_rate_correct", "response_tokens", "reflection_tokens")
ENVIRONMENT = "environment"  # the column of trajectories by which `plot_curves` can compare
MAX_SERIES = 8  # curves of one figure; the others are named below it
MAX_BANDS = 3  # with more curves, intervals would cover each other
_X = {"step": "step", "tokens": "tokens generated so far", "rollouts": "rollouts so far"}


def plot_curves(
    runs: RunsLike,
    metrics: Sequence[str] = DEFAULT_METRICS,
    *,
    by: str | None = None,
    x: str = "step",
    where: Where = None,
    reference: bool = False,
) -> Figure:
    """Plot metrics over steps, one panel per metric. Vertical lines mark stage boundaries; crosses mark alerts.

    metrics: names of `metrics.METRICS`, or `eval/<set>/<name>` for evaluations during training.
    reference: draw the paper's published value as a line, for evaluation sets and tool errors (`paper.reference`).

    by: recipe key (such as `rl.method.roc.rule`) whose values are compared; runs with the same value are averaged as its seeds.
    Default: one curve per run, without evaluations if there are training runs; at most eight, the newest, and the title names the
    others. With more than three curves no intervals are drawn.
    `environment`: one curve for each environment of a run.
    x: step, tokens (generated, including dropped rollouts) or rollouts.
    The intervals are over seeds if a curve has several runs (Student's t), else over problems.
    where: filter of the rollouts or steps. Raises RunStoreError for an unknown x or key.
    """
    runs = as_runs(runs)
    if x not in _X:
        raise RunStoreError(f"x must be one of {', '.join(_X)}, got {x!r}")
    names = list(metrics)
    frame = _curve_frame(runs, names, by, x, where)
    groups = list(dict.fromkeys(frame.group))
    if by is None:  # the newest first
        started = runs.runs().set_index("run_id").get("created", pd.Series(dtype=str))
        groups.sort(key=lambda run: str(started.get(run, "")), reverse=True)
    left_out = groups[MAX_SERIES:]
    frame = frame[~frame.group.isin(left_out)]
    if len(groups) > MAX_BANDS:
        frame = frame.assign(low=np.nan, high=np.nan)
    look = list(dict.fromkeys(frame.group))
    points = frame.rename(columns={"group": "line"}).assign(text=frame.step)
    panels = [Panel(get_metric(name).title, points[points.metric == name], get_metric(name).percent) for name in names]
    figure = draw_panels(panels, x=_X[x], hover="step %{text}: %{y}", order=look)
    whole = by != ENVIRONMENT and selects_steps(where)  # alerts are those of all rollouts of a step
    alerts = find_alerts(runs, where if whole else {"step": []})
    alerts = alerts.merge(recipe_groups(runs, None if by == ENVIRONMENT else by), on="run_id")
    for number, name in enumerate(names):
        if panels[number].points["value"].isna().all():
            continue
        place = panel_place(number)
        crosses = frame.merge(alerts[alerts.metric == name].drop(columns="value"), on=["group", "metric", "step"])
        if len(crosses):
            _mark_alerts(figure, crosses, line_styles(look), place)
        if reference and (published := paper.reference(name)) is not None:
            label = f"{paper.reference_name(name)}: {published:{'.1%' if get_metric(name).percent else ',.0f'}}"
            figure.add_hline(published, line={"dash": "dot", "width": 1}, annotation_text=label, **place)
        if x == "step":
            _mark_stages(figure, runs, where, place)
    if left_out:
        shown = ", ".join(left_out[:12]) + (f" and {len(left_out) - 12} more" if len(left_out) > 12 else "")
        figure.update_layout(
            title={"text": f"<sub>not drawn: {escaped(shown)}; select with `where` or `run_ids`</sub>"}
        )
    return Figure(figure, frame)


def plot_outcomes(runs: RunsLike, where: Where = None) -> Figure:
    """Plot the share of failed tool calls by outcome over steps. Infrastructure failures are hatched."""
    runs = as_runs(runs)
    frame = runs.sql(
        f"""SELECT step, outcome, count(*) AS calls
            FROM (SELECT step, unnest(outcomes) AS outcome FROM trajectories WHERE {runs.condition(where)})
            GROUP BY ALL ORDER BY ALL"""
    )
    frame["share"] = frame.calls / frame.groupby("step").calls.transform("sum")
    frame["ours"] = frame.outcome.isin(INFRASTRUCTURE_FAILURES)
    figure = go.Figure()
    for outcome in [str(outcome) for outcome in Outcome if outcome != Outcome.OK]:
        part = frame[frame.outcome == outcome]
        if len(part):
            figure.add_bar(
                x=part.step, y=part.share, name=outcome, marker=outcome_marker(outcome),
                customdata=[narrowed(where, step=int(step), outcome=outcome) for step in part.step],
                hovertemplate=f"step %{{x}}<br>{outcome} %{{y:.1%}}<extra></extra>",
            )  # fmt: skip
    if not figure.data:
        text = "no failed tool call is recorded"
        figure.add_annotation(text=text, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
    figure.update_layout(barmode="stack", height=400, title="outcomes of failed calls")
    figure.update_yaxes(tickformat=".0%", title="share of all calls")
    figure.update_xaxes(title="step")
    return Figure(figure, frame)


def plot_lengths(runs: RunsLike, where: Where = None) -> Figure:
    """Plot the distribution of response lengths over steps: median, middle 50% and middle 80% of the trajectories."""
    runs = as_runs(runs)
    quantiles = {"p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9}
    values = ", ".join(f"quantile_cont(response_tokens, {share}) AS {name}" for name, share in quantiles.items())
    frame = runs.sql(
        f"""SELECT step, count(response_tokens) AS n, {values} FROM trajectories WHERE {runs.condition(where)}
            GROUP BY step ORDER BY step"""
    )
    figure = go.Figure()
    for low, high, opacity in (("p10", "p90", 0.15), ("p25", "p75", 0.3)):
        band(figure, frame.step, frame[low], frame[high], COLOURS[0], opacity)
    figure.add_scatter(
        x=frame.step, y=frame.p50, mode="lines+markers", name="median", line={"color": COLOURS[0], "width": 2.5},
        customdata=[narrowed(where, step=int(step)) for step in frame.step],
        hovertemplate="step %{x}<br>median %{y:.0f}<extra></extra>",
    )  # fmt: skip
    _mark_stages(figure, runs, where, {})
    title = get_metric("response_tokens").title
    figure.update_layout(height=400, title=f"{title}: median, middle 50% and 80%", showlegend=False)
    figure.update_xaxes(title="step")
    figure.update_yaxes(title=title, rangemode="tozero")
    return Figure(figure, frame)


def plot_pass_at_k(
    runs: RunsLike, ks: Sequence[int] = (1, 2, 4, 8), *, where: Where = None, names: Mapping[str, str] | None = None
) -> Figure:
    """Plot pass@k with intervals over problems, one curve per run. names: other names for run ids."""
    frame = pass_at_k(runs, ks, where=where)
    points = frame.rename(columns={"k": "x"})
    points["line"] = [(names or {}).get(run_id, run_id) for run_id in frame.run_id]
    points["where"] = pd.Series([narrowed(where, run_id=run_id) for run_id in frame.run_id], dtype=object)
    figure = draw_panels([Panel("pass@k", points, percent=True)], x="k", hover="k %{x}: %{y:.1%}")
    figure.update_xaxes(type="log", tickvals=list(ks), ticktext=[str(k) for k in ks])
    return Figure(figure, frame)


def recipe_groups(runs: Runs, by: str | None) -> pd.DataFrame:
    """Return the columns run_id and group: the value of a recipe key, or the run id if `by` is None.

    Evaluations and forks of a training run have its recipe, but are no seeds of it: with a key, only training runs are returned,
    if there are any. Raises RunStoreError for an unknown key; the message names the nearest one.
    """
    table = runs.runs()
    if by is None or by == "run_id":
        return pd.DataFrame({"run_id": table.run_id, "group": table.run_id})
    column = by if by in table.columns else f"recipe.{by}"
    if column not in table.columns:
        keys = [name.removeprefix("recipe.") for name in table.columns if name.startswith("recipe.")]
        near = difflib.get_close_matches(by, keys, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(keys[:20])}"
        raise RunStoreError(f"no run has recipe key {by!r}; {hint}")
    table = training_runs(table)
    # Values other than labels are shown with the name of their key.
    prefix = "" if by == "label" else f"{column.removeprefix('recipe.').split('.')[-1]}: "
    values = [f"{prefix}{'not set' if pd.isna(value) else value}" for value in table[column]]
    return pd.DataFrame({"run_id": table.run_id, "group": values})


def _curve_frame(runs: Runs, names: list[str], by: str | None, x: str, where: Where) -> pd.DataFrame:
    """Return one row per point: group, metric, step, x, value, low, high, n (trajectories), runs, where (SQL)."""
    groups = recipe_groups(runs, None if by == ENVIRONMENT else by)
    rolled = [name for name in names if get_metric(name).rolled_up or get_metric(name).logged]
    # The trainer writes the interval of a held-out pass@1 beside it.
    held_out = [name for name in rolled if get_metric(name).logged and name.endswith("pass1")]
    logged = evaluations(runs) if held_out else []
    ends = {name: [f"{name.removesuffix('pass1')}{side}" for side in ("low", "high")] for name in held_out}
    ends = {name: sides for name, sides in ends.items() if {*sides} <= {*logged}}
    names_of_ends = [side for sides in ends.values() for side in sides]
    wide = curves(runs, [*dict.fromkeys([*rolled, *names_of_ends])], where).merge(groups, on="run_id")
    if by is None:
        trained = training_runs(runs.runs())
        wide = wide[wide.run_id.isin(trained.run_id)] if wide.run_id.isin(trained.run_id).any() else wide
    several = wide.groupby("group").run_id.nunique().gt(1).any()
    if x == "step":
        wide["x"] = wide.step
    else:  # tokens or rollouts that each run had generated by the end of each step
        amount = "rows_trajectories" if x == "rollouts" else "response_tokens_n * response_tokens_mean"
        made = runs.sql(f"SELECT run_id, step, {amount} AS x FROM rollup ORDER BY run_id, step")
        wide = wide.merge(made.assign(x=made.groupby("run_id").x.cumsum()), on=["run_id", "step"], how="left")
    long = wide.melt(["group", "run_id", "stage", "step", "x", "n"], rolled, "metric", "value")
    for name, sides in ends.items():
        long.loc[long.metric == name, ["low", "high"]] = wide[sides].to_numpy(float)
    # Bands over problems read the trajectories; they are drawn for single runs only.
    read = [name for name in names if name not in rolled] if several else names
    read = names if by == ENVIRONMENT else read
    read = [name for name in read if not get_metric(name).logged]
    if read:
        keys = ["run_id", "step"] + ([ENVIRONMENT] if by == ENVIRONMENT else [])
        measured = measure(runs, read, by=keys, where=where)
        measured = measured.merge(wide[["group", "run_id", "stage", "step", "x"]], on=["run_id", "step"])
        if by == ENVIRONMENT:
            measured["group"] = measured[ENVIRONMENT].fillna("no environment")
        long = pd.concat([long[~long.metric.isin(read)], measured], ignore_index=True)
    long["value"] = long["value"].astype(float)
    chosen = None if selects_steps(where) else where
    rows: list[tuple[Any, ...]] = []
    for (group, metric, step), part in long.groupby(["group", "metric", "step"], sort=True):
        part = part[part["value"].notna()]
        if part.empty:
            continue
        count = len(part)
        value, low, high, _ = mean_interval(part["value"].to_numpy(float))
        if count == 1:
            low, high = (part[side].iloc[0] if side in part else np.nan for side in ("low", "high"))
        if get_metric(str(metric)).percent:
            low, high = np.clip([low, high], 0, 1)
        # A group of rollouts without an environment is named "no environment".
        environment = {} if by != ENVIRONMENT else {ENVIRONMENT: None if group == "no environment" else str(group)}
        chosen_here = narrowed(chosen, run_id=list(part.run_id), step=int(part.step.iloc[0]), **environment)
        rows.append((group, metric, step, part.x.mean(), value, low, high, int(part.n.sum()), count, chosen_here))
    columns = ["group", "metric", "step", "x", "value", "low", "high", "n", "runs", "where"]
    return pd.DataFrame(rows, columns=columns)


def _mark_alerts(
    figure: go.Figure, points: pd.DataFrame, look: dict[str, tuple[str, str, str]], place: dict[str, int]
) -> None:
    """Draw a cross in the curve's colour at the first step of each alert. The hover text gives value and threshold."""
    colours = [look[group][0] for group in points.group]
    texts = [
        html("{}, step {}: {}<br>{}", row.run_id, row.step, row.alert, row.evidence) for row in points.itertuples()
    ]
    figure.add_scatter(
        x=points.x, y=points["value"], mode="markers", name="alerts", showlegend=False, customdata=points["where"], text=texts,
        marker={"symbol": "x", "size": 11, "color": colours, "line": {"width": 1}}, hovertemplate="%{text}<extra></extra>", **place,
    )  # fmt: skip


def _mark_stages(figure: go.Figure, runs: Runs, where: Where, place: dict[str, int]) -> None:
    """Draw a vertical line between stages, if all runs change stages at the same steps."""
    starts = runs.sql(
        f"""SELECT DISTINCT stage, step FROM (
              SELECT run_id, stage, min(step) AS step FROM trajectories WHERE {runs.condition(where)} GROUP BY run_id, stage
              QUALIFY min(step) > min(min(step)) OVER (PARTITION BY run_id))
            ORDER BY step"""
    )
    if starts.stage.duplicated().any():
        return
    for stage, step in starts.itertuples(index=False):
        at = step - 0.5
        note = {"text": escaped(stage), "showarrow": False, "xanchor": "left", "yanchor": "top", "yref": "y domain"}
        figure.add_vline(x=at, line={"width": 1, "dash": "dot"}, opacity=0.6, **place)
        figure.add_annotation(x=at, y=1, **note, **place)
