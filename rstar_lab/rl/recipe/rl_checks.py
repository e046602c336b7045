"""Combinations of keys of different sections of `rl` that are not allowed."""

from typing import TYPE_CHECKING

from rstar_lab.rl.methods import (
    Branching,
    CrossPolicy,
    Grpo,
    Opd,
    Otb,
    OverlongBuffer,
    Sdpo,
    TaskNormalisation,
    ToolBudget,
)
from rstar_lab.rl.plugins import NAME
from rstar_lab.rl.recipe.schedule import Async, OffPolicy

if TYPE_CHECKING:
    from rstar_lab.rl.recipe.rl import RlSection


def check_combinations(rl: "RlSection") -> None:
    """Raise ValueError for keys that cannot be combined. The message names the key."""
    method, schedule = rl.method, rl.schedule
    if rl.correction.type != "none" and rl.old_log_probs == "engine":
        raise ValueError(
            "correction requires old_log_probs: trainer (with engine, the importance ratio already corrects the difference)"
        )
    if isinstance(method, Otb) and rl.old_log_probs == "engine":
        raise ValueError("method otb requires old_log_probs: trainer, which computes the baselines")
    if method.added(Opd) and rl.temperature != 1.0:
        raise ValueError(
            f"method.add: opd requires temperature: 1, at which the teacher is scored; it is {rl.temperature:g}"
        )
    if method.kl_coefficient and (teacher := method.added(Opd) or method.added(Sdpo)):
        raise ValueError(
            f"method.kl_coefficient cannot be combined with {teacher.type}: a step has one reference model; set it to 0"
        )
    if method.added(ToolBudget) and not isinstance(method, Grpo):
        raise ValueError("method.add: tool_budget requires method: {type: grpo}")
    if method.added(TaskNormalisation) and isinstance(method, Otb):
        raise ValueError(
            "method.add: task_normalisation cannot be combined with method otb, which has advantages of its own"
        )
    if method.roc.min_positive + method.roc.min_negative > rl.group_size:
        raise ValueError(f"method.roc: min_positive + min_negative must be at most group_size, {rl.group_size}")
    if (overlong := method.added(OverlongBuffer)) and overlong.tokens > rl.limits.max_response_tokens:
        raise ValueError(
            f"method.add: tokens of overlong_buffer must be at most limits.max_response_tokens, {rl.limits.max_response_tokens}"
        )
    if method.added(Branching):
        _check_branching(rl)
    if method.added(CrossPolicy):
        _check_cross_policy(rl)
    if rl.sync.carry_over and rl.old_log_probs != "engine":
        raise ValueError(
            "schedule.carry_over requires old_log_probs: engine (the trainer does not keep older policy versions)"
        )
    if isinstance(schedule, OffPolicy) and rl.correction.type == "none" and not schedule.allow_uncorrected:
        raise ValueError(
            "this schedule trains on rollouts of older weights: set correction (for example {type: tis}, with "
            "old_log_probs: trainer), or schedule.allow_uncorrected: true"
        )
    if isinstance(schedule, Async) and schedule.groups(rl.problems_per_step) < rl.problems_per_step:
        raise ValueError(f"schedule.buffer_groups must be at least problems_per_step, {rl.problems_per_step}")
    if len({name.partition(":")[2] for name in rl.metrics}) < len(rl.metrics):
        raise ValueError("metrics: two functions have the same name; rename one")
    if rl.environments and rl.prompt.format == "released":
        raise ValueError("environments requires prompt: {format: paper} or {format: model}")
    for entry in rl.environments:
        if (entry.limits.max_response_tokens or 0) > rl.limits.max_response_tokens:
            raise ValueError(
                f"environments.{entry.name}.limits.max_response_tokens: at most limits.max_response_tokens, "
                f"{rl.limits.max_response_tokens}"
            )


def _check_cross_policy(rl: "RlSection") -> None:
    """Raise ValueError for keys with which the turns of a rollout cannot have two policies."""
    if rl.schedule.type != "sync" or rl.sync.lockstep or rl.sync.step_time_s is not None:
        raise ValueError("method.add: cross_policy requires schedule: {type: sync}, without lockstep and step_time_s")
    if rl.correction.type == "none" and rl.old_log_probs != "engine":
        raise ValueError(
            "method.add: cross_policy trains on tokens of an older policy: set correction (for example {type: tis}), or "
            "old_log_probs: engine"
        )


def _check_branching(rl: "RlSection") -> None:
    """Raise ValueError for keys with which rollouts cannot branch."""
    if rl.sync.lockstep:
        raise ValueError(
            "method.add: branching cannot be combined with schedule.lockstep (a branch starts in the middle of a batch)"
        )
    if rl.sync.carry_over:
        raise ValueError("method.add: branching cannot be combined with schedule.carry_over: set it to false")
    for entry in rl.environments:
        if entry.environment is not None:
            raise ValueError(
                f"method.add: branching cannot be combined with environments.{entry.name}.environment, whose state cannot be "
                "copied"
            )
    for tool in (*rl.tools, *(tool for entry in rl.environments for tool in entry.tools)):
        if ":" in tool and not NAME.fullmatch(tool):
            raise ValueError(
                f"method.add: branching cannot be combined with the tool {tool}: the state of a server cannot be copied"
            )
