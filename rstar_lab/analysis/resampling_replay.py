"""Replay of RoC resampling on recorded rollouts, to compare resampling rules.

The rollouts of a step are resampled offline with the function that training uses (`rl.algorithm.roc.resample`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.runs import Runs, named_rows
from rstar_lab.figure_theme import COLOURS
from rstar_lab.outcomes import count_errors
from rstar_lab.rl.algorithm.advantages import group_advantages
from rstar_lab.rl.algorithm.roc import (
    OwnRule,
    SelectionRule,
    released_tool_error_penalty,
    resample,
    rewards_equal,
    tool_error_penalty,
)
from rstar_lab.runs import RunStoreError
from rstar_lab.runs.messages import read_messages

Errors = Literal["outcomes", "substring"]


def group_rollouts(runs: Runs, traj_id: str) -> pd.DataFrame:
    """Return the rollouts of the group of a trajectory, with penalties and the column selection: kept, or why dropped."""
    row = runs.trajectory(traj_id)
    columns = [
        "traj_id", "sample", "reward", "kept", "selection", "penalty", "p_err", "p_format", "advantage", "errors", "calls",
        "outcomes", "turns", "response_tokens", "answer",
    ]  # fmt: skip
    frame = runs.trajectories(
        {"run_id": row.run_id, "step": int(row.step), "group_id": row.group_id}, order_by="sample, traj_id"
    )
    frame["penalty"] = frame.p_err + frame.p_format
    kept = frame.kept.fillna(False).astype(bool)
    if kept.any():
        dropped = "dropped by resampling"
    else:
        dropped = "dropped: all kept rewards were equal"
    frame["selection"] = np.where(kept, "kept", dropped)
    return frame[columns]


@dataclass(frozen=True)
class Replay:
    """A step resampled with another rule. Result of `replay`.

    rows: one row per rollout: reward, p_err and penalty under this rule, kept and advantage (as trained), kept_share (share
    of draws in which this rule kept it), new_advantage (mean over the draws that kept it).
    summary: one row for the batch as trained and one for this rule (means over the draws).
    """

    name: str
    rows: pd.DataFrame
    summary: pd.DataFrame


def replay(
    runs: Runs,
    run_id: str,
    step: int,
    *,
    rule: SelectionRule | OwnRule = "paper",
    keep: int | None = None,
    weights: tuple[float, float] = (1.0, 1.0),
    errors: Errors = "outcomes",
    min_positive: int = 0,
    min_negative: int = 0,
    draws: int = 100,
    seed: int = 0,
) -> Replay:
    """Resample one step of a run with another rule and return the resulting batch beside the trained one.

    rule: rule of `rl.algorithm.roc.resample`, which can be a function; none keeps every rollout. keep: rollouts kept
    per group; None: the recipe's rl.group_size, else half of the group. weights: weights of p_err and p_format in the
    penalty. errors: how p_err counts errors: `outcomes`, or `substring` (the word "error" in a tool response, as in the
    release), which requires transcripts. draws: number of draws of a random rule. Raises RunStoreError if the run has no such step.
    """
    frame = runs.trajectories({"run_id": run_id, "step": int(step)}, order_by="group_id, sample, traj_id")
    if frame.empty:
        raise RunStoreError(f"run {run_id} has no step {step}")
    frame["p_err"] = _penalties(runs, frame, errors)
    frame["penalty"] = weights[0] * frame.p_err + weights[1] * frame.p_format.fillna(0)
    keep = keep or _group_size(runs, run_id)
    times = draws if callable(rule) or rule in ("paper", "random") else 1
    rng = np.random.default_rng(seed)
    groups = [part.index.to_numpy() for _, part in frame.groupby("group_id", sort=False)]
    rewards, penalties = frame.reward.to_numpy(float), frame.penalty.to_numpy(float)
    count, total = np.zeros(len(frame)), np.zeros(len(frame))
    summaries = []
    for _ in range(times):
        chosen, advantages = np.zeros(len(frame), bool), np.full(len(frame), np.nan)
        for members in groups:
            if rule == "none":
                picked = members
            else:
                size = keep or max(1, len(members) // 2)
                order = resample(
                    list(rewards[members]), list(penalties[members]), size, rule=rule, min_positive=min_positive,
                    min_negative=min_negative, rng=rng,
                )  # fmt: skip
                picked = members[order]
            if rewards_equal(list(rewards[picked])):
                continue
            chosen[picked] = True
            advantages[picked] = group_advantages(rewards[picked], [0] * len(picked))
        count += chosen
        total += np.nan_to_num(advantages)
        summaries.append(_summary(frame, chosen, advantages))
    name = (rule.__name__ if callable(rule) else rule) + (
        "" if weights == (1.0, 1.0) else f", weights {weights[0]:g} and {weights[1]:g}"
    )
    name += ", substring errors" if errors == "substring" else ""
    kept = frame.kept.fillna(False).to_numpy(bool)
    trained = _summary(frame, kept, frame.advantage.to_numpy(float))
    summary = pd.DataFrame([trained, pd.DataFrame(summaries).mean().to_dict()], index=["as trained", name])
    columns = [
        "traj_id",
        "group_id",
        "problem_id",
        "sample",
        "reward",
        "errors",
        "calls",
        "p_err",
        "p_format",
        "penalty",
    ]
    rows = frame[[*columns, "kept", "advantage"]].copy()
    rows["kept_share"] = count / times
    with np.errstate(invalid="ignore"):
        rows["new_advantage"] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return Replay(name, rows, summary.rename_axis("batch").reset_index())


def plot_replays(replays: Sequence[Replay]) -> Figure:
    """Plot the tool-error rate of the batch as trained and under other rules, for all and for correct rollouts."""
    if not replays:
        raise RunStoreError("replays: at least one is required")
    frame = pd.concat(
        [replays[0].summary.iloc[:1], *(replay.summary.iloc[1:] for replay in replays)], ignore_index=True
    )
    figure = go.Figure()
    shown = (("error_rate", "all kept"), ("error_rate_correct", "kept and correct"))
    for (column, name), colour, shape in zip(shown, COLOURS, ("", "/"), strict=False):
        figure.add_bar(
            x=frame.batch, y=frame[column], name=name, marker={"color": colour, "pattern": {"shape": shape}},
            hovertemplate="%{x}<br>" + name + ": %{y:.1%}<extra></extra>",
        )  # fmt: skip
    figure.update_yaxes(tickformat=".0%", title="tool-error rate of the batch")
    figure.update_layout(height=400, barmode="group")
    return Figure(figure, frame)


def _penalties(runs: Runs, frame: pd.DataFrame, errors: Errors) -> np.ndarray:
    if errors == "outcomes":
        stored = frame.p_err.notna()
        computed = [_error_penalty(row) for row in named_rows(frame[["outcomes", "errors", "calls"]])]
        return np.where(stored, frame.p_err, computed)
    transcripts = runs.sql(
        "SELECT traj_id, messages FROM transcripts WHERE run_id = ? AND step = ?",
        [str(frame.run_id.iloc[0]), int(frame.step.iloc[0])],
    )
    responses = {
        row.traj_id: [message["content"] for message in read_messages(row.messages) if message["role"] == "tool"]
        for row in named_rows(transcripts)
    }
    if missing := set(frame.traj_id) - responses.keys():
        raise RunStoreError(f"errors='substring' requires transcripts, but {sorted(missing)[0]} has none")
    return np.array([released_tool_error_penalty(responses[traj_id]) for traj_id in frame.traj_id])


def _error_penalty(row: Any) -> float:
    errors, calls = count_errors(list(row.outcomes)) if row.outcomes is not None else (row.errors, row.calls)
    return tool_error_penalty(errors, calls)


def _group_size(runs: Runs, run_id: str) -> int | None:
    table = runs.runs().set_index("run_id")
    size = table.get("recipe.rl.group_size", pd.Series(dtype=float)).get(run_id)
    return int(size) if size is not None and pd.notna(size) else None


def _summary(frame: pd.DataFrame, kept: np.ndarray, advantages: np.ndarray) -> dict[str, float]:
    part, correct = frame[kept], frame[kept & (frame.reward > 0).to_numpy()]

    def error_rate(rows: pd.DataFrame) -> float:
        calls = rows.calls.sum()
        return float(rows.errors.sum() / calls) if calls else float("nan")

    return {
        "rollouts": int(kept.sum()),
        "groups": part.group_id.nunique(),
        "positive_share": float((part.reward > 0).mean()) if len(part) else float("nan"),
        "error_rate": error_rate(part),
        "error_rate_correct": error_rate(correct),
        "penalty": float(part.penalty.mean()),
        "penalty_correct": float(correct.penalty.mean()),
        "response_tokens": float(part.response_tokens.mean()),
        "response_tokens_correct": float(correct.response_tokens.mean()),
        "mean_positive_advantage": float(np.nanmean(positive))
        if len(positive := advantages[advantages > 0])
        else float("nan"),
    }
