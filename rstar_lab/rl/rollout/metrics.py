"""Metrics of a step that are computed from its rollouts, and what they say about a model, in words.

`rstar-lab doctor` examines a whole run with more rules."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES
from rstar_lab.rl.methods.user_functions import user_metric
from rstar_lab.rl.trajectory import StopReason, Trajectory
from rstar_lab.untrusted.text import counted

_FEW, _MOST = 0.1, 0.5


def error_rate(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the share of tool calls that failed through the model's fault; None without calls."""
    counts = [t.errors_and_calls for t in trajectories]
    calls = sum(count for _, count in counts)
    return sum(errors for errors, _ in counts) / calls if calls else None


def rollout_metrics(trajectories: Sequence[Trajectory], own: Sequence[str] = ()) -> dict[str, float | int | None]:
    """Return the metrics over all rollouts of a step, including dropped ones. `correct` and `reward` leave out the rollouts
    that a failure of the engine or the environment ended.

    `metrics/<name>`: mean of a user's metric over the rollouts that have it, or the value of a user's function of all
    rollouts. `env/<name>/...`: the main metrics of the rollouts of an environment. `correct_unrewarded`: share of
    rollouts whose answer equals the true answer as text, but whose reward is not above 0. `control_tokens`: share of
    rollouts in which the model wrote a misplaced control token. `used_tool`, `answered`: share of rollouts with a tool call, and
    with an answer in the asked format. own: names of user functions,
    `module:name` (recipe key `rl.metrics`).
    """
    correct = [t for t in trajectories if t.reward > 0]
    outcomes = Counter(call.outcome for t in trajectories for call in t.calls)

    def mean(values: Sequence[float]) -> float | None:
        return float(np.mean(values)) if values else None

    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values[f"metrics/{name}"].append(value)
    metrics = {
        "rollouts": len(trajectories),
        "reward": mean([t.reward for t in trajectories if t.usable]),
        "correct": mean([t.reward > 0 for t in trajectories if t.usable]),
        "error_rate": error_rate(trajectories),
        "error_rate_correct": error_rate(correct),
        "response_tokens": mean([len(t.response_ids) for t in trajectories]),
        "response_tokens_correct": mean([len(t.response_ids) for t in correct]),
        "turns": mean([len(t.turns) for t in trajectories]),
        "calls": mean([len(t.calls) for t in trajectories]),
        "truncated": mean([t.truncated for t in trajectories]),
        "used_tool": mean([bool(t.calls) for t in trajectories]),
        "answered": mean([t.answer is not None for t in trajectories]),
        "correct_unrewarded": mean(
            [t.reward <= 0 and (t.answer or "").strip() == t.truth.strip() for t in trajectories]
        ),
        "duplicate_answers": mean([t.text.count("<answer>") > 1 for t in trajectories]),
        "control_tokens": mean([any(turn.control_token for turn in t.turns) for t in trajectories]),
        "sandbox_failures": sum(outcomes[outcome] for outcome in INFRASTRUCTURE_FAILURES),
        "engine_failures": sum(t.stop_reason is StopReason.ENGINE_ERROR for t in trajectories),
        "tool_s": sum(turn.tool_s for t in trajectories for turn in t.turns),
    } | {name: mean(values[name]) for name in sorted(values)}
    if failed := sum(t.stop_reason is StopReason.ENVIRONMENT_ERROR for t in trajectories):
        metrics["environment_failures"] = failed
    if undecided := sum(t.stop_reason is StopReason.UNDECIDED for t in trajectories):
        metrics["undecided"] = undecided
    if branched := sum("branch_turn" in t.metrics for t in trajectories):
        metrics["branches"] = branched
    metrics |= environment_metrics(trajectories)
    return metrics | {f"metrics/{name.partition(':')[2]}": user_metric(name)(trajectories) for name in own}


def environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float | int | None]:
    """Return rollouts, reward, correct, error_rate, turns and p_err of each environment as `env/<name>/<metric>`.

    Rollouts that name no environment are left out. Means are over the rollouts whose environment did not fail.
    """
    by_name: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.environment:
            by_name[trajectory.environment].append(trajectory)
    metrics: dict[str, float | int | None] = {}
    for name, every in sorted(by_name.items()):
        group = [t for t in every if t.usable]
        means: dict[str, list[float]] = {
            "reward": [t.reward for t in group],
            "correct": [float(t.reward > 0) for t in group],
            "turns": [len(t.turns) for t in group],
            "response_tokens": [len(t.response_ids) for t in group],
            "p_err": [t.p_err for t in group],
        }
        metrics |= {f"env/{name}/{key}": float(np.mean(values)) if values else None for key, values in means.items()}
        metrics[f"env/{name}/error_rate"] = error_rate(group)
        metrics[f"env/{name}/rollouts"] = len(every)
    return metrics


def rollout_line(metrics: Mapping[str, Any], *, tools: bool) -> str:
    """Return how many rollouts are correct, used a tool and have an answer in the asked format.

    Args:
        metrics: `rollouts`, and the shares `correct`, `used_tool` and `answered` of them.
        tools: whether the rollouts had tools.
    """
    count = metrics["rollouts"]
    correct = metrics["correct"] or 0.0
    parts = [f"{_number(correct, count)} of {counted(count, 'rollout')} correct"]
    if correct in (0.0, 1.0):
        parts[0] += f" (all rewards {'positive' if correct else '0'}: nothing to learn from)"
    if tools:
        failed = metrics.get("error_rate")
        calls = "" if failed is None else f" ({failed:.0%} of the calls failed)"
        parts.append(f"{_number(metrics['used_tool'], count)} used a tool{calls}")
    parts.append(f"{_number(metrics['answered'], count)} have an answer in the asked format")
    return ", ".join(parts)


def first_step_line(metrics: Mapping[str, Any], *, tools: bool, steps: int) -> str:
    """Return the line about the first step of a run: rollouts, speed, time and memory of the phases, and expected end.

    Args:
        metrics: metrics of the step, with the peak memory of the phases in GB as `<phase>_gb`.
        tools: whether the rollouts had tools.
        steps: number of steps that are left.
    """
    phases = [phase_text(name, metrics) for name in ("generate", "update", "weights")]
    left = steps * metrics["step_s"]
    end = datetime.now() + timedelta(seconds=left)
    return (
        f"first step: {rollout_line(metrics, tools=tools)}; {metrics['generated_tokens_per_s']:.0f} tokens/s; "
        f"{', '.join(phases)}; expected end in {_duration(left)} ({end:%a %H:%M})"
    )


def phase_text(name: str, metrics: Mapping[str, Any]) -> str:
    """Return the seconds of a phase (`<phase>_s`), and its peak memory (`<phase>_gb`) if it was measured."""
    memory = metrics.get(f"{name}_gb")
    return f"{name} {metrics[f'{name}_s']:.1f} s" + ("" if memory is None else f" ({memory:.1f} GB)")


def first_remedy(metrics: Mapping[str, Any], *, tools: bool) -> str:
    """Return the first thing to try for rollouts with equal rewards. Arguments: see `rollout_line`."""
    if (metrics["correct"] or 0.0) >= _MOST:
        return "use harder problems: the model solves these already"
    if (metrics["truncated"] or 0.0) > _MOST:
        return "raise rl.limits.max_response_tokens: most rollouts end at this limit"
    if (metrics["answered"] or 0.0) < _MOST:
        return (
            "run SFT first (`rstar-lab init --sft`): most rollouts have no answer in the asked format; or read the answer "
            "elsewhere with rl.answer=boxed or rl.answer=last_number"
        )
    if tools and (metrics["used_tool"] or 0.0) < _FEW:
        return "run SFT first (`rstar-lab init --sft`): the model does not call the tool"
    if tools and (metrics.get("error_rate") or 0.0) > _MOST:
        return "run SFT first (`rstar-lab init --sft`): most tool calls fail"
    return "use easier problems, or more rollouts per problem (rl.group_size), until some are correct"


def nothing_learnt(lines: Sequence[Mapping[str, Any]], *, tools: bool) -> str | None:
    """Return why a run has learnt nothing and the first thing to try; None if at least one step trained the policy.

    Args:
        lines: metrics of the steps of the run.
        tools: whether the rollouts had tools.
    """
    if not lines or any(line.get("kept") for line in lines):
        return None
    metrics = {
        name: sum(line.get(name) or 0.0 for line in lines) / len(lines)
        for name in ("correct", "used_tool", "answered", "truncated", "error_rate")
    }
    rewards = {0.0: "all rewards are 0", 1.0: "all rewards are positive"}.get(
        metrics["correct"], "the rewards of every group are equal"
    )
    steps = "the step" if len(lines) == 1 else f"all {len(lines)} steps"
    return f"nothing was learnt: {rewards} in {steps}. First: {first_remedy(metrics, tools=tools)}"


def _number(share: float | None, count: int) -> int:
    return round((share or 0.0) * count)


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )
