"""Metrics. Each metric is a ratio of two sums over trajectories, and is defined once, with its formula and source.

Metrics include all rollouts of a step, also those that resampling dropped. Without the dropped rollouts a resampled
policy would look better than it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from rstar_lab.analysis.filters import Where, selects_steps
from rstar_lab.analysis.queries import quoted
from rstar_lab.analysis.runs import Runs, RunsLike, as_runs
from rstar_lab.common.estimates import pass_at_k as pass_at_k_of
from rstar_lab.common.estimates import ratio
from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, MODEL_ERRORS
from rstar_lab.runs import RunStoreError


@dataclass(frozen=True)
class Metric:
    """sum(numerator) / sum(denominator) over trajectories. Both are SQL per trajectory, NULL if unknown.

    rolled_up: numerator and denominator as SQL over a row of the rollup; None if the rollup does not contain them.
    better: +1 if higher is better, -1 if lower is better, else 0. logged: read from the metrics that the trainer wrote.
    """

    name: str
    title: str
    formula: str
    numerator: str
    denominator: str
    rolled_up: tuple[str, str] | None
    better: int = 0
    percent: bool = False
    logged: bool = False


def _count(outcomes: frozenset) -> str:
    names = ", ".join(f"'{outcome}'" for outcome in sorted(outcomes))
    return f"len(list_filter(outcomes, lambda x: x IN ({names})))"


_ERRORS = f"coalesce({_count(MODEL_ERRORS)}, errors)"
_CALLS = f"coalesce(len(outcomes) - {_count(INFRASTRUCTURE_FAILURES)}, calls)"


def _sum(column: str) -> str:
    return f"{column}_n * coalesce({column}_mean, 0)"


def _mean(
    name: str, title: str, formula: str, column: str = "", expression: str = "", *, better: int = 0, percent: bool = False
) -> Metric:  # fmt: skip
    """Return the metric that is the mean of `expression` over trajectories and of the rollup's `column`. Default of both: the name."""
    column = column or name
    expression = expression or column
    rolled_up = (_sum(column), f"{column}_n")
    present = f"(({expression}) IS NOT NULL)::INT"
    return Metric(name, title, formula, f"({expression})::DOUBLE", present, rolled_up, better, percent)


def _among(metric: Metric, reward: str, name: str, title: str, rolled_up: tuple[str, str]) -> Metric:
    """Return a metric over the trajectories whose reward satisfies a condition such as `> 0`."""
    numerator, denominator = (
        f"CASE WHEN reward {reward} THEN {sql} END" for sql in (metric.numerator, metric.denominator)
    )
    formula = f"{metric.name} over the trajectories with reward {reward}"
    return Metric(name, title, formula, numerator, denominator, rolled_up, metric.better, metric.percent)


_ERROR_RATE = Metric(
    "tool_error_rate", "tool-error rate", "calls that failed because of the model / calls, both without infrastructure failures",
    _ERRORS, _CALLS, (_sum("errors"), _sum("calls")), -1, True,
)  # fmt: skip
_TOKENS = _mean("response_tokens", "response length (tokens)", "mean number of model and tool tokens of a response")
_DUPLICATES = Metric(
    "duplicate_answers", "duplicate answers",
    "trajectories with more than one answer tag / trajectories (p_format > 0 and an answer given)",
    "(p_format > 0 AND (p_format < 1 OR answer IS NOT NULL))::INT", "(p_format IS NOT NULL)::INT",
    (_sum("duplicate_answer"), "duplicate_answer_n"), -1, True,
)  # fmt: skip
_ALL = (
    Metric(
        "pass1", "pass@1", "trajectories with a correct answer / trajectories (before resampling)",
        "correct::INT", "(correct IS NOT NULL)::INT", (_sum("correct"), "CASE WHEN NOT own_reward THEN correct_n END"), 1, True,
    ),
    Metric(
        "rewarded", "rewarded", "trajectories with reward > 0 / trajectories (before resampling)",
        "rewarded::INT", "(reward IS NOT NULL)::INT", (_sum("correct"), "correct_n"), 1, True,
    ),
    _mean("reward", "reward", "mean reward", better=1),
    _ERROR_RATE,
    _among(
        _ERROR_RATE, "> 0", "tool_error_rate_correct", "tool-error rate in correct trajectories",
        (_sum("correct_errors"), _sum("correct_calls")),
    ),
    _among(
        _ERROR_RATE, "<= 0", "tool_error_rate_incorrect", "tool-error rate in incorrect trajectories",
        (f"{_sum('errors')} - {_sum('correct_errors')}", f"{_sum('calls')} - {_sum('correct_calls')}"),
    ),
    Metric(
        "our_failure_rate", "infrastructure failures", "calls that ended as sandbox_error or queue_timeout / all calls",
        _count(INFRASTRUCTURE_FAILURES), "len(outcomes)",
        (_sum("our_failures"), f"{_sum('our_failures')} + CASE WHEN our_failures_n > 0 THEN {_sum('calls')} END"), -1, True,
    ),
    _mean("calls", "tool calls", "mean number of tool calls of a trajectory, without infrastructure failures", expression=_CALLS),
    _mean("turns", "turns", "mean number of turns of a trajectory"),
    _TOKENS,
    _among(
        _TOKENS, "> 0", "response_tokens_correct", "response length of correct trajectories (tokens)",
        (_sum("correct_response_tokens"), "correct_response_tokens_n"),
    ),
    _mean("model_tokens", "model tokens", "mean number of tokens generated by the model"),
    _mean(
        "tool_tokens", "tool tokens", "mean number of response tokens not generated by the model",
        expression="response_tokens - model_tokens",
    ),
    _mean(
        "truncation_rate", "truncated", "trajectories truncated by a limit / trajectories", "truncated", better=-1, percent=True
    ),
    _DUPLICATES,
    _among(
        _DUPLICATES, "> 0", "duplicate_answers_correct", "duplicate answers in correct trajectories",
        (_sum("correct_duplicate_answer"), "correct_duplicate_answer_n"),
    ),
    Metric(
        "entropy", "entropy (nats per token)",
        "mean entropy of the next-token distribution over the model tokens of trajectories that have it (kept)",
        "entropy * model_tokens", "CASE WHEN entropy IS NOT NULL THEN model_tokens END",
        (_sum("entropy_sum"), _sum("entropy_tokens")),
    ),
    Metric(
        "log_prob_gap", "engine minus trainer log-prob (nats per token)",
        "mean over model tokens of engine log-prob - trainer log-prob: an estimate of KL(engine, trainer)",
        "(engine_log_prob - trainer_log_prob) * model_tokens",
        "CASE WHEN engine_log_prob - trainer_log_prob IS NOT NULL THEN model_tokens END", (_sum("gap_sum"), _sum("gap_tokens")),
    ),
    _mean(
        "reflection_tokens", "reflection words",
        "mean number of words of runs.reflection_words.REFLECTION_WORDS in the model's own text",
    ),
    _mean("p_err", "p_err", "mean tool-error penalty (p_err of the paper)", better=-1),
    _mean("p_format", "p_format", "mean format penalty (p_format of the paper)", better=-1),
    _mean("kept", "kept", "trajectories kept for training / trajectories", percent=True),
    _mean("generate_s", "generation (s)", "mean seconds of generation of a trajectory", better=-1),
    _mean("tool_s", "tool calls (s)", "mean seconds of tool calls of a trajectory", better=-1),
    _mean("queue_s", "queueing (s)", "mean seconds that the calls of a trajectory waited", better=-1),
)  # fmt: skip
METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}


def get_metric(name: str) -> Metric:
    """Return the metric of a name; for `metrics.<name>` the mean of that entry of the column `metrics`; for `eval/<set>/<name>` the
    result of an evaluation during training, such as eval/aime24/pass1.

    Raises RunStoreError with the known names if there is none of this name.
    """
    problems, _, kind = name.removeprefix(EVALUATION).rpartition("/")
    if name.startswith(EVALUATION) and problems:
        share = kind.startswith(("pass", "maj")) or kind.endswith(("rate", "truncated", "low", "high"))
        title = f"{'pass@1' if kind == 'pass1' else kind} on {problems}"
        return Metric(name, title, f"{name} as the trainer logged it", "NULL", "NULL", None, percent=share, logged=True)
    if name.startswith(REPORTED):
        entry = name.removeprefix(REPORTED)
        value, formula = f"metrics[{quoted(entry)}]", f"mean of metrics['{entry}'], of the reward or environment"
        return Metric(name, entry, formula, value, f"({value} IS NOT NULL)::INT", None)
    if name not in METRICS:
        raise RunStoreError(f"unknown metric {name!r}; there are {', '.join(METRICS)}")
    return METRICS[name]


EVALUATION = "eval/"  # prefix of the results of evaluations during training
REPORTED = "metrics."  # prefix of metrics that a reward function or an environment reports
SOLVED = 0.5  # a problem counts as solved if at least this share of its rollouts is correct


def curves(runs: RunsLike, names: Sequence[str], where: Where = None) -> pd.DataFrame:
    """Return one row per step: run_id, stage, step, n and one column per metric.

    Reads only the rollups, and for `eval/<set>/<name>` the metrics that the trainer wrote; steps without an evaluation are NaN.
    A filter `where` of anything but run_id, stage, step and steps reads the trajectories instead. Raises RunStoreError for a metric
    that only `measure` can compute, or an evaluation that no run has.
    """
    runs = as_runs(runs)
    metrics = [get_metric(name) for name in names]
    logged = [metric.name for metric in metrics if metric.logged]
    rolled = {metric.name: metric.rolled_up for metric in metrics if metric.rolled_up}
    if missing := [metric.name for metric in metrics if not metric.logged and metric.name not in rolled]:
        raise RunStoreError(f"{missing[0]} is not in the rollup; use measure(), which reads the trajectories")
    values = "".join(f', ({above}) / nullif({below}, 0) AS "{name}"' for name, (above, below) in rolled.items())
    if selects_steps(where):
        columns, condition = f"run_id, stage, step, rows_trajectories AS n{values}", runs.condition(where, "steps")
        frame = runs.sql(f"SELECT {columns} FROM rollup WHERE {condition} ORDER BY 1, 3")
    else:
        frame = _curves_of_rollouts(runs, list(rolled), where)
    if logged:
        frame = frame.merge(_logged(runs, logged), on=["run_id", "stage", "step"], how="left")
    return frame[["run_id", "stage", "step", "n", *names]]


def _curves_of_rollouts(runs: Runs, names: Sequence[str], where: Where) -> pd.DataFrame:
    """Return the rows of `curves` for the rollouts that match a filter, from the trajectories."""
    keys = ["run_id", "stage", "step"]
    values = measure(runs, names, by=keys, where=where).pivot(index=keys, columns="metric", values="value")
    select = "SELECT run_id, stage, step, count(*) AS n FROM trajectories"
    counts = runs.sql(f"{select} WHERE {runs.condition(where)} GROUP BY ALL ORDER BY 1, 3")
    return counts.merge(values.reindex(columns=list(names)).reset_index(), on=keys, how="left")


def evaluations(runs: RunsLike) -> list[str]:
    """Return the names of the results of evaluations during training, such as eval/aime24/pass1."""
    return sorted(name for name in as_runs(runs).trainer_metrics().columns if str(name).startswith(EVALUATION))


def held_out_metrics(runs: RunsLike) -> list[str]:
    """Return the names of the evaluations' pass@1, such as eval/aime24/pass1."""
    return [name for name in evaluations(runs) if name.endswith("/pass1")]


def _logged(runs: Runs, names: Sequence[str]) -> pd.DataFrame:
    measured = runs.trainer_metrics()
    if missing := [name for name in names if name not in measured.columns]:
        there = ", ".join(evaluations(runs)) or "none; set evaluate.during.every to evaluate during training"
        raise RunStoreError(f"no run has {missing[0]}; evaluations: {there}")
    frame = measured[["run_id", "stage", "step", *names]].copy()
    frame[list(names)] = frame[list(names)].apply(pd.to_numeric, errors="coerce")
    return frame


def measure(
    runs: RunsLike, names: Sequence[str], *, by: Sequence[str] = ("run_id",), where: Where = None
) -> pd.DataFrame:
    """Return one row per group and metric: the columns of `by`, metric, value, low, high, n, clusters.

    n: trajectories. clusters: problems. low and high: 95% interval over problems (docs/metrics.md).

    Args:
        runs: Opened runs.
        names: Metrics.
        by: Columns of trajectories, such as run_id, stage, step.
        where: Filter of the trajectories.
    """
    runs = as_runs(runs)
    metrics = [get_metric(name) for name in names]
    sums = sum_by_problem(runs, metrics, by, where)
    rows = []
    for key, group in sums.groupby(list(by), dropna=False, sort=True) if by else [((), sums)]:
        named = dict(zip(by, key, strict=True))
        for metric in metrics:
            above, below = (group[f"{metric.name}_{side}"].to_numpy(float) for side in ("numerator", "denominator"))
            estimate = ratio(above, below, int(group[f"{metric.name}_n"].sum()))
            rows.append({**named, "metric": metric.name, **vars(estimate)})
    return pd.DataFrame(rows, columns=[*by, "metric", "value", "low", "high", "n", "clusters"])


def sum_by_problem(runs: Runs, metrics: Sequence[Metric], by: Sequence[str], where: Where) -> pd.DataFrame:
    """Return one row per group and problem: `by`, problem_id and each metric's NAME_numerator, NAME_denominator, NAME_n."""
    if logged := [metric.name for metric in metrics if metric.logged]:
        raise RunStoreError(f"{logged[0]} is logged once per evaluation; use curves()")
    parts = []
    for metric in metrics:
        both = f"({metric.numerator}) IS NOT NULL AND ({metric.denominator}) > 0"
        parts += [
            f'sum({metric.numerator}) FILTER ({both}) AS "{metric.name}_numerator"',
            f'sum({metric.denominator}) FILTER ({both}) AS "{metric.name}_denominator"',
            f'count(*) FILTER ({both}) AS "{metric.name}_n"',
        ]
    columns = ", ".join(f'"{name}"' for name in (*by, "problem_id"))
    return runs.sql(
        f"""SELECT {columns}, {", ".join(parts)} FROM trajectories
            WHERE {runs.condition(where)} GROUP BY {columns} ORDER BY ALL"""
    )


def pass_at_k(runs: RunsLike, ks: Sequence[int] = (1, 2, 4, 8), *, where: Where = None) -> pd.DataFrame:
    """Return pass@k of each run: the mean over problems of the unbiased estimator 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1. Problems with fewer than k rollouts are left out.
    Columns: run_id, k, value, low, high, n, clusters.
    """
    runs = as_runs(runs)
    counts = runs.sql(
        f"""SELECT run_id, problem_id, count(correct) AS n, count(*) FILTER (correct) AS c FROM trajectories
            WHERE {runs.condition(where)} GROUP BY ALL ORDER BY ALL"""
    )
    rows = []
    for run_id, group in counts.groupby("run_id"):
        for k in ks:
            enough = group[group.n >= k]
            values = np.array([pass_at_k_of(k, n, c) for n, c in zip(enough.n, enough.c, strict=True)], dtype=float)
            estimate = ratio(values, np.ones(len(values)), int(enough.n.sum()))
            rows.append({"run_id": run_id, "k": k, **vars(estimate)})
    return pd.DataFrame(rows, columns=["run_id", "k", "value", "low", "high", "n", "clusters"])


# --- what became of the rollouts: each was trained on, or left out for one reason

NAMES = {"trained": "trained on", "roc": "not selected by RoC", "equal_group": "group with equal rewards"}
_PREFIX = "class/"  # of the metrics


def rollout_classes(runs: RunsLike) -> pd.DataFrame:
    """Return one row per run and class: run_id, rollout_class, rollouts, share.

    The rows of a run add up to its stored rollouts. Classes are those of the metrics `class/...`; rollouts that no step counts in
    a class, such as groups dropped for their age, are `not in a batch`. Runs without these metrics have no rows.
    """
    runs = as_runs(runs)
    measured = runs.trainer_metrics()
    names = [name for name in measured.columns if name.startswith(_PREFIX)]
    rows = []
    stored = runs.sql("SELECT run_id, count(*) AS n FROM trajectories GROUP BY 1").set_index("run_id").n
    for run_id, part in measured.groupby("run_id") if names else ():
        counts = part[names].sum().astype(int)
        if not part[names].notna().any(axis=None) or run_id not in stored:
            continue
        counts["not in a batch"] = int(stored[run_id]) - int(counts.sum())
        rows += [
            (run_id, name.removeprefix(_PREFIX), int(count), count / int(stored[run_id]))
            for name, count in zip(map(str, counts.index), counts, strict=True)
            if count or name == _PREFIX + "trained"
        ]
    frame = pd.DataFrame(rows, columns=["run_id", "rollout_class", "rollouts", "share"])
    return frame.sort_values(["run_id", "rollouts"], ascending=[True, False], ignore_index=True)


def class_title(name: str) -> str:
    """Return a class for readers, such as "masked (sandbox_error)"."""
    kind, _, reason = name.partition("/")
    return NAMES.get(kind, kind) + (f" ({reason})" if reason else "")
