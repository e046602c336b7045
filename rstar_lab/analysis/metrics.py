"""Every metric, defined once: a ratio of two sums over trajectories, with formula and source.

Metrics are over ALL rollouts of a step unless said otherwise: those that resampling dropped are rollouts of the policy
too, and leaving them out would flatter it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
import pandas as pd

from rstar_lab.analysis.bootstrap import RESAMPLES, Estimate, ratio
from rstar_lab.analysis.runs import Runs, Where, sql_condition
from rstar_lab.outcomes import INFRASTRUCTURE_FAILURES, MODEL_ERRORS
from rstar_lab.runs import RunStoreError


@dataclass(frozen=True)
class Metric:
    """sum(numerator) / sum(denominator) over trajectories; both SQL per trajectory, NULL where unknown.

    rolled_up: the two as SQL over a row of the rollup, None where the rollup cannot tell.
    better: +1 more is better, -1 less is better, 0 neither.
    """

    name: str
    title: str
    formula: str
    numerator: str
    denominator: str
    rolled_up: tuple[str, str] | None
    better: int = 0
    percent: bool = False


def _count(outcomes: frozenset) -> str:
    names = ", ".join(f"'{outcome}'" for outcome in sorted(outcomes))
    return f"len(list_filter(outcomes, lambda x: x IN ({names})))"


_ERRORS = f"coalesce({_count(MODEL_ERRORS)}, errors)"
_CALLS = f"coalesce(len(outcomes) - {_count(INFRASTRUCTURE_FAILURES)}, calls)"
_DUPLICATE = "(p_format > 0 AND (p_format < 1 OR answer IS NOT NULL))::INT"


def _sum(column: str) -> str:
    return f"{column}_n * coalesce({column}_mean, 0)"


def _mean(
    name: str,
    title: str,
    formula: str,
    column: str | None = None,
    expression: str | None = None,
    *,
    better: int = 0,
    percent: bool = False,
) -> Metric:
    """A plain mean: of `expression` over trajectories, and of the rollup's `column`."""
    column = column or name
    expression = expression or column
    known = f"(({expression}) IS NOT NULL)::INT"
    rolled_up = (_sum(column), f"{column}_n")
    return Metric(name, title, formula, f"({expression})::DOUBLE", known, rolled_up, better, percent)


def _of_correct(metric: Metric, name: str, title: str, numerator: str, denominator: str) -> Metric:
    return Metric(
        name,
        title,
        f"{metric.name} over the trajectories with reward > 0",
        f"CASE WHEN reward > 0 THEN {metric.numerator} END",
        f"CASE WHEN reward > 0 THEN {metric.denominator} END",
        (numerator, denominator),
        metric.better,
        metric.percent,
    )


_ERROR_RATE = Metric(
    "tool_error_rate",
    "tool-error rate",
    "calls that failed by the model's doing / calls, failures of ours in neither",
    _ERRORS,
    _CALLS,
    (_sum("errors"), _sum("calls")),
    -1,
    True,
)
_TOKENS = _mean("response_tokens", "response length (tokens)", "model and tool tokens of a response, mean")
_MODEL_TOKENS = _mean("model_tokens", "model tokens", "tokens the model wrote itself, mean")

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "pass1",
            "pass@1",
            "trajectories with a correct answer / trajectories (all rollouts, before resampling)",
            "correct::INT",
            "(correct IS NOT NULL)::INT",
            (_sum("correct"), "CASE WHEN NOT own_reward THEN correct_n END"),
            1,
            True,
        ),
        Metric(
            "rewarded",
            "rewarded",
            "trajectories with reward > 0 / trajectories (all rollouts, before resampling)",
            "rewarded::INT",
            "(reward IS NOT NULL)::INT",
            (_sum("correct"), "correct_n"),
            1,
            True,
        ),
        _mean("reward", "reward", "mean reward", better=1),
        _ERROR_RATE,
        _of_correct(
            _ERROR_RATE,
            "tool_error_rate_correct",
            "tool-error rate in correct trajectories",
            _sum("correct_errors"),
            _sum("correct_calls"),
        ),
        Metric(
            "tool_error_rate_incorrect",
            "tool-error rate in incorrect trajectories",
            "tool_error_rate over the trajectories with reward <= 0",
            f"CASE WHEN reward <= 0 THEN {_ERRORS} END",
            f"CASE WHEN reward <= 0 THEN {_CALLS} END",
            (f"{_sum('errors')} - {_sum('correct_errors')}", f"{_sum('calls')} - {_sum('correct_calls')}"),
            -1,
            True,
        ),
        Metric(
            "our_failure_rate",
            "calls that failed by our doing",
            "calls that ended as sandbox_error or queue_timeout / all calls",
            _count(INFRASTRUCTURE_FAILURES),
            "len(outcomes)",
            (_sum("our_failures"), f"{_sum('our_failures')} + CASE WHEN our_failures_n > 0 THEN {_sum('calls')} END"),
            -1,
            True,
        ),
        _mean("calls", "tool calls", "tool calls of a trajectory, failures of ours left out, mean", expression=_CALLS),
        _mean("turns", "turns", "turns of a trajectory, mean"),
        _TOKENS,
        _of_correct(
            _TOKENS,
            "response_tokens_correct",
            "response length of correct trajectories (tokens)",
            _sum("correct_response_tokens"),
            "correct_response_tokens_n",
        ),
        _MODEL_TOKENS,
        _mean(
            "tool_tokens",
            "tool tokens",
            "response tokens the model did not write, mean",
            expression="response_tokens - model_tokens",
        ),
        _mean(
            "truncation_rate",
            "truncated",
            "trajectories cut by a limit / trajectories",
            "truncated",
            better=-1,
            percent=True,
        ),
        Metric(
            "duplicate_answers",
            "duplicate answers",
            "trajectories with more than one answer tag / trajectories (p_format > 0 and an answer given)",
            _DUPLICATE,
            "(p_format IS NOT NULL)::INT",
            (_sum("duplicate_answer"), "duplicate_answer_n"),
            -1,
            True,
        ),
        Metric(
            "duplicate_answers_correct",
            "duplicate answers in correct trajectories",
            "duplicate_answers over the trajectories with reward > 0",
            f"CASE WHEN reward > 0 THEN {_DUPLICATE} END",
            "CASE WHEN reward > 0 THEN (p_format IS NOT NULL)::INT END",
            (_sum("correct_duplicate_answer"), "correct_duplicate_answer_n"),
            -1,
            True,
        ),
        Metric(
            "void_turns",
            "void turns",
            "turns with neither a call nor the answer / turns (SimpleTIR, arXiv 2509.02479)",
            "CASE WHEN turns_with_call IS NOT NULL "
            "THEN greatest(turns - turns_with_call - (answer IS NOT NULL)::INT, 0) END",
            "CASE WHEN turns_with_call IS NOT NULL THEN turns END",
            None,
            -1,
            True,
        ),
        Metric(
            "entropy",
            "entropy (nats a token)",
            "entropy of the policy's next-token distribution, mean over model tokens of trajectories that have it (kept)",
            "entropy * model_tokens",
            "CASE WHEN entropy IS NOT NULL THEN model_tokens END",
            (_sum("entropy_sum"), _sum("entropy_tokens")),
        ),
        Metric(
            "log_prob_gap",
            "engine minus trainer log-prob (nats a token)",
            "mean over model tokens of engine log-prob - trainer log-prob: an estimate of KL(engine, trainer)",
            "(engine_log_prob - trainer_log_prob) * model_tokens",
            "CASE WHEN engine_log_prob - trainer_log_prob IS NOT NULL THEN model_tokens END",
            (_sum("gap_sum"), _sum("gap_tokens")),
        ),
        _mean(
            "reflection_tokens",
            "reflection words",
            "words of runs.reflection_words.REFLECTION_WORDS in the model's own text, mean",
        ),
        _mean("p_err", "p_err", "tool-error penalty of the paper, mean", better=-1),
        _mean("p_format", "p_format", "format penalty of the paper, mean", better=-1),
        _mean("kept", "kept", "trajectories kept for training / trajectories", percent=True),
        _mean("generate_s", "generation (s)", "seconds of generation of a trajectory, mean", better=-1),
        _mean("tool_s", "tool calls (s)", "seconds of tool calls of a trajectory, mean", better=-1),
        _mean("queue_s", "queueing (s)", "seconds a trajectory's calls waited, mean", better=-1),
    )
}


def get_metric(name: str) -> Metric:
    """Raises RunStoreError that lists the metrics for an unknown name."""
    if name not in METRICS:
        raise RunStoreError(f"unknown metric {name!r}; there are {', '.join(METRICS)}")
    return METRICS[name]


def curves(runs: Runs, names: Sequence[str], where: Where = None) -> pd.DataFrame:
    """run_id, stage, step, n and one column a metric, a row a step, from the rollups alone (fast, no intervals).

    where: condition on run_id, stage and step.
    """
    metrics = [get_metric(name) for name in names]
    if missing := [metric.name for metric in metrics if metric.rolled_up is None]:
        raise RunStoreError(f"{missing[0]} is not in the rollup; use measure(), which reads the trajectories")
    values = ", ".join(
        f'({m.rolled_up[0]}) / nullif({m.rolled_up[1]}, 0) AS "{m.name}"' for m in metrics if m.rolled_up
    )
    condition, parameters = sql_condition(where)
    query = f"SELECT run_id, stage, step, rows_trajectories AS n, {values} FROM rollup WHERE {condition} ORDER BY 1, 3"
    return runs.sql(query, parameters)


def measure(
    runs: Runs,
    names: Sequence[str],
    *,
    by: Sequence[str] = ("run_id",),
    where: Where = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> pd.DataFrame:
    """One row a group and metric: the columns of `by`, metric, value, low, high, n (trajectories), clusters (problems).

    by: columns of trajectories, e.g. run_id, stage, step. Intervals: bootstrap over problems, 95%.
    """
    metrics = [get_metric(name) for name in names]
    sums = sum_by_problem(runs, metrics, by, where)
    rows = []
    groups = sums.groupby(list(by), dropna=False, sort=True) if by else [((), sums)]
    for key, group in groups:
        for metric in metrics:
            numerator = group[f"{metric.name}_numerator"].to_numpy(dtype=float)
            denominator = group[f"{metric.name}_denominator"].to_numpy(dtype=float)
            n = int(group[f"{metric.name}_n"].sum())
            found = ratio(numerator, denominator, n, resamples=resamples, seed=seed)
            rows.append({**dict(zip(by, key, strict=True)), "metric": metric.name, **vars(found)})
    return pd.DataFrame(rows, columns=[*by, "metric", "value", "low", "high", "n", "clusters"])


def sum_by_problem(runs: Runs, metrics: Sequence[Metric], by: Sequence[str], where: Where) -> pd.DataFrame:
    """Numerators and denominators sum_by_problem by group and problem."""
    condition, parameters = sql_condition(where)
    keys = ", ".join(f'"{name}"' for name in by)
    parts = []
    for metric in metrics:
        both = f"({metric.numerator}) IS NOT NULL AND ({metric.denominator}) > 0"
        parts += [
            f'sum({metric.numerator}) FILTER ({both}) AS "{metric.name}_numerator"',
            f'sum({metric.denominator}) FILTER ({both}) AS "{metric.name}_denominator"',
            f'count(*) FILTER ({both}) AS "{metric.name}_n"',
        ]
    source = "trajectories"
    if any("turns_with_call" in metric.numerator for metric in metrics):
        source = _WITH_CALLS
    query = f"""SELECT {keys}{"," if keys else ""} problem_id, {", ".join(parts)} FROM {source}
                WHERE {condition} GROUP BY {keys}{"," if keys else ""} problem_id ORDER BY ALL"""
    return runs.sql(query, parameters)


# turns_with_call is unknown where calls were made, but none of them is in the store.
_WITH_CALLS = """(
    SELECT t.*, CASE WHEN found.turns IS NOT NULL THEN found.turns WHEN calls = 0 THEN 0 END AS turns_with_call
    FROM trajectories t LEFT JOIN
      (SELECT traj_id, count(DISTINCT turn) AS turns FROM calls GROUP BY traj_id) found USING (traj_id)
)"""


def pass_at_k(
    runs: Runs, ks: Sequence[int] = (1, 2, 4, 8), *, by: Sequence[str] = ("run_id",), where: Where = None, seed: int = 0
) -> pd.DataFrame:
    """pass@k by the unbiased estimator 1 - C(n - c, k) / C(n, k) of each problem, averaged over problems.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1. A problem with fewer than k rollouts says nothing about k.
    Columns: those of `by`, k, value, low, high, n, clusters. Rollouts of a problem in one group are pooled.
    """
    condition, parameters = sql_condition(where)
    keys = ", ".join(f'"{name}"' for name in by)
    comma = "," if keys else ""
    counts = runs.sql(
        f"""SELECT {keys}{comma} problem_id, count(correct) AS n, count(*) FILTER (correct) AS c FROM trajectories
            WHERE {condition} GROUP BY {keys}{comma} problem_id ORDER BY ALL""",
        parameters,
    )
    rows = []
    for key, group in counts.groupby(list(by), dropna=False, sort=True) if by else [((), counts)]:
        for k in ks:
            enough = group[group.n >= k]
            values = np.array(
                [1 - comb(n - c, k) / comb(n, k) for n, c in zip(enough.n, enough.c, strict=True)], dtype=float
            )
            found = ratio(values, np.ones(len(values)), int(enough.n.sum()), seed=seed)
            rows.append({**dict(zip(by, key, strict=True)), "k": k, **vars(found)})
    return pd.DataFrame(rows, columns=[*by, "k", "value", "low", "high", "n", "clusters"])


def outcome_mix(runs: Runs, *, by: Sequence[str] = ("run_id", "step"), where: Where = None) -> pd.DataFrame:
    """Calls by outcome and by whether the trajectory was correct: columns of `by`, correct, outcome, calls, share.

    share: of the calls of the group's correct (or incorrect) trajectories.
    """
    condition, parameters = sql_condition(where)
    keys = ", ".join(f'"{name}"' for name in by)
    comma = "," if keys else ""
    query = f"""
        SELECT *, calls / sum(calls) OVER (PARTITION BY {keys}{comma} correct) AS share FROM (
            SELECT {keys}{comma} reward > 0 AS correct, outcome, count(*) AS calls
            FROM (SELECT *, unnest(outcomes) AS outcome FROM trajectories WHERE {condition}) GROUP BY ALL)
        ORDER BY ALL"""
    return runs.sql(query, parameters)


__all__ = ["METRICS", "Estimate", "Metric", "curves", "get_metric", "measure", "outcome_mix", "pass_at_k"]
