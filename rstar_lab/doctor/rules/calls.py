"""Rules over tool calls, environments, engines and times."""

import re
from operator import itemgetter

import numpy as np
import pandas as pd

from rstar_lab.common.estimates import Estimate, format_interval, ratio
from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES
from rstar_lab.doctor.rule import LEVEL, Check, Evidence, Log, among, examples, share
from rstar_lab.exchange.rollout_rows import FOREIGN_NAMES

FAILURES = {str(outcome) for outcome in INFRASTRUCTURE_FAILURES}
_ERROR = re.compile("|".join(FOREIGN_NAMES["outputs"]["errors"]), re.IGNORECASE | re.MULTILINE)


def no_tool_calls(log: Log) -> Evidence | None:
    late = log.last().dropna(subset=["calls"])
    if len(late) < 20 or (log.rollouts.calls.fillna(0).sum() == 0 and log.source != "rstar_lab"):
        return None
    value = share(late.calls > 0, late)
    if value[0] > 0.02 or value[2] > 0.2:
        return None
    text = f"{format_interval(value, '.0%')} of the rollouts of the last steps call a tool"
    return Evidence(text, {"share": value[0], "high": value[2]}, (), examples(late), 0.4)


def most_calls_fail(log: Log) -> Evidence | None:
    late = log.last()
    if not log.has("rollouts.errors") and log.has("texts"):
        # Other tools log no outcomes; errors are read from the outputs.
        late = log.texts()[log.texts().step.isin(late.step)]
        errors = late.outputs.map(lambda outputs: sum(bool(_ERROR.search(text[:2000])) for text in outputs))
        late = late.assign(errors=errors, calls=late.outputs.map(len))
    called = late[late.calls.fillna(0) > 0].dropna(subset=["errors"])
    if called.empty:
        return None
    rate = _rate(called, "problem_id")
    if rate.value > 0.75 and len(called) >= 16:  # few problems say little about others, but enough about this run
        rate = _rate(called, "traj_id")
    if not rate.low > 0.45:
        return None
    text = f"{rate.value:.0%} of the {int(called.calls.sum())} calls of the last steps fail"
    return Evidence(text, {"rate": rate.value, "low": rate.low}, (), examples(called[called.errors > 0]), 0.4)


def _rate(called: pd.DataFrame, unit: str) -> Estimate:
    by = called.groupby(unit)[["errors", "calls"]].sum().astype(float)
    return ratio(by.errors.to_numpy(), by.calls.to_numpy(), len(called), level=LEVEL)


def tools_fail(log: Log) -> Evidence | None:
    called = log.rollouts[log.rollouts.calls.fillna(0) > 0]
    counts = called.outcomes.map(lambda own: 0 if np.ndim(own) == 0 else sum(str(name) in FAILURES for name in own))
    failed, calls = int(counts.sum()), float(called.calls.sum())
    if calls < 50 or failed / calls < 0.02:
        return None
    hit = called[counts > 0]
    text = f"{failed:,} of {int(calls):,} calls ({failed / calls:.0%}) failed in the infrastructure, in {len(hit):,} rollouts"
    steps = sorted(hit.step.unique().astype(int))
    return Evidence(text, {"share": failed / calls}, steps, examples(hit), len(hit) / len(called))


def empty_outputs(log: Log) -> Evidence | None:
    texts = log.texts()
    # Programs that print nothing are the model's fault: only rollouts that print in each call count.
    called = texts[(texts.outputs.map(len) > 0) & (texts.own.str.count(r"print\(") >= texts.outputs.map(len))]
    empty = called.outputs.map(lambda outputs: any(not text.strip() for text in outputs)).astype(bool)
    return among(called, empty, "rollouts whose programs print have a successful tool call without output", above=0.02)


def _first_programs(log: Log) -> pd.DataFrame:
    """Return traj_id, step, problem_id, program and output of the first call of each rollout whose program prints."""
    texts = log.texts()
    texts = texts[texts.first_call.map(lambda call: call is not None and "print(" in call[0])]
    first = texts.first_call
    return texts.assign(program=first.map(itemgetter(0)), output=first.map(lambda call: call[1].strip()))


def outputs_of_other_calls(log: Log) -> Evidence | None:
    """The first program of a rollout has no state, so equal programs have equal outputs."""
    called = _first_programs(log)
    called = called[~called.program.str.contains(r"random|time|uuid|date|id\(|hash|set\(|shuffle|urandom|requests")]
    called = called[called.groupby("program").output.transform("size") >= 2]
    usual = called.groupby("program").output.transform(lambda outputs: outputs.mode().iloc[0])
    return among(called, called.output != usual, "equal programs have different outputs", above=0.15, cost=0.7)


def one_output(log: Log) -> Evidence | None:
    called = _first_programs(log)
    if called.program.nunique() < 20:
        return None
    usual = called.output.mode().iloc[0]
    same = (called.output == usual) & (usual != "")
    return among(called, same, "different programs have the same output", above=0.7, cost=0.7)


def ended_with(what: str, *reasons: str) -> Check:
    """Return a check for rollouts that end with one of these stop reasons."""

    def check(log: Log) -> Evidence | None:
        rows = log.rollouts[log.rollouts.stop_reason.notna()]
        hit = rows.stop_reason.isin(reasons)
        found = among(rows, hit, f"rollouts {what}", above=0.003, least=5, cost=float(hit.mean()))
        return found if hit.sum() >= 3 else None

    return check


failed_environments = ended_with("ended with an error of their environment", "environment_error", "error")
failed_requests = ended_with("ended because an engine failed", "engine_error")


def dead_engine(log: Log) -> Evidence | None:
    used = log.rollouts.dropna(subset=["engine"])
    steps = sorted(used.step.unique())
    if len(steps) < 4 or used.engine.nunique() < 2:
        return None
    shares = used[used.step.isin(steps[: len(steps) // 2])].engine.value_counts(normalize=True)
    late = used[used.step.isin(steps[-2:])]
    # An engine that still worked would miss all of these rollouts with a probability below exp(-7) = 0.001.
    gone = sorted(set(shares.index[shares * len(late) > 7]) - set(late.engine))
    if not gone:
        return None
    last = int(used[used.engine == gone[0]].step.max())
    text = f"{', '.join(map(str, gone))} generated nothing after step {last}; {late.engine.nunique()} of {len(shares)} engines work"
    return Evidence(text, {"lost": len(gone)}, [last], (), len(gone) / len(shares))


def slow_engine(log: Log) -> Evidence | None:
    used = log.rollouts.dropna(subset=["engine", "generate_s", "model_tokens"])
    sums = used.groupby(["step", "engine"])[["generate_s", "model_tokens"]].sum()
    rates = (sums.generate_s / sums.model_tokens.replace(0, np.nan)).unstack("engine").dropna(axis="columns", thresh=4)
    if rates.shape[1] < 2:
        return None
    slowest = rates.median().idxmax()
    times = (rates[slowest] / rates.drop(columns=slowest).median(axis="columns")).dropna()
    if len(times) < 4 or times.median() < 2 or (times > 1.5).mean() < 0.75:
        return None
    text = f"{slowest} needs {times.median():.1f} times as long per token as the median of the other {rates.shape[1] - 1}, "
    text += f"and is slower in {(times > 1).mean():.0%} of {len(times)} steps"
    return Evidence(text, {"times": float(times.median())}, (), examples(used[used.engine == slowest]), 0.3)


def waiting_for_tools(log: Log) -> Evidence | None:
    rows = log.last().dropna(subset=["queue_s", "generate_s"])
    waiting, generating = float(rows.queue_s.sum()), float(rows.generate_s.sum())
    if waiting < 60 or waiting < generating:
        return None
    text = f"{waiting:,.0f} s in the queue of the tool against {generating:,.0f} s of generation in the last steps"
    return Evidence(text, {"queue_s": waiting, "generate_s": generating}, (), examples(rows), 0.3)
