"""What the metrics of a step (`rl.step`) say about a model, in words.

`rstar-lab doctor` examines a whole run with more rules."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from rstar_lab.untrusted.text import counted, duration

_FEW, _MOST = 0.1, 0.5


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
        f"{', '.join(phases)}; expected end in {duration(left)} ({end:%a %H:%M})"
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
