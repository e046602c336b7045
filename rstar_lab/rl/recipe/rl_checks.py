"""Combinations of keys of the `rl` section that are not allowed."""

from typing import TYPE_CHECKING

from rstar_lab.rl.plugins import NAME
from rstar_lab.rl.section import is_own

if TYPE_CHECKING:
    from rstar_lab.rl.recipe.rl import RlSection


def check_combinations(rl: "RlSection") -> None:
    """Raise ValueError for keys that cannot be combined. The message names the key."""
    if rl.importance_cap is not None and rl.correction != "none":
        raise ValueError("give correction with correction_bounds, or importance_cap, not both")
    correction, (low, high) = rl.resolved_correction
    if correction != "none" and rl.old_log_probs == "engine":
        name = "correction" if rl.importance_cap is None else "importance_cap"
        raise ValueError(
            f"{name} requires old_log_probs: trainer (with engine, the importance ratio already corrects the difference)"
        )
    if rl.advantage == "otb" and rl.old_log_probs == "engine":
        raise ValueError("advantage: otb requires old_log_probs: trainer, which computes the baselines")
    if rl.tool_budget and rl.advantage != "group":
        raise ValueError("tool_budget requires advantage: group")
    if rl.self_distillation and rl.teacher_weight:
        raise ValueError("self_distillation and teacher_weight cannot be combined: set one to 0")
    if rl.teacher_weight and rl.temperature != 1.0:
        raise ValueError(
            f"teacher_weight requires temperature: 1, at which the teacher is scored; it is {rl.temperature:g}"
        )
    if rl.kl_coefficient and (rl.teacher_weight or rl.self_distillation):
        name = "teacher_weight" if rl.teacher_weight else "self_distillation"
        raise ValueError(f"kl_coefficient cannot be combined with {name}: a step has one reference model; set one to 0")
    if rl.correction_bounds is not None and (rl.correction == "none" or is_own(rl.correction)):
        raise ValueError("correction_bounds requires correction to be one of the built-in corrections")
    if is_own(rl.roc) and (rl.roc_min_positive or rl.roc_min_negative):
        raise ValueError("roc_min_positive and roc_min_negative require one of the built-in rules in roc")
    if len({name.partition(":")[2] for name in rl.metrics}) < len(rl.metrics):
        raise ValueError("metrics: two functions have the same name; rename one")
    if not 0 <= low < high:
        raise ValueError(f"correction_bounds must be 0 <= low < high, got {low:g}, {high:g}")
    if correction in ("tis", "seq_tis") and low > 0:
        raise ValueError(f"correction {correction} has no lower bound: set correction_bounds to [0, {high:g}]")
    if rl.step_time_s is not None and rl.rollout == "lockstep":
        raise ValueError("step_time_s requires rollout: async (a time limit makes lockstep runs irreproducible)")
    if rl.carry_over:
        if rl.step_time_s is None:
            raise ValueError("carry_over requires step_time_s, the time at which rollouts are cut")
        if rl.old_log_probs != "engine":
            raise ValueError(
                "carry_over requires old_log_probs: engine (the trainer does not keep older policy versions)"
            )
        if rl.dynamic_sampling:
            raise ValueError(
                "carry_over cannot be combined with dynamic_sampling: the rewards of unfinished groups are unknown"
            )
    if rl.mode != "sync":
        _check_mode(rl)
    if rl.branching is not None:
        _check_branching(rl)
    if rl.environments and rl.prompt_format == "released":
        raise ValueError("environments requires prompt_format: paper or model")
    _check_prompts(rl)
    for entry in rl.environments:
        if (entry.limits.max_response_tokens or 0) > rl.max_response_tokens:
            raise ValueError(
                f"environments.{entry.name}.limits.max_response_tokens: at most max_response_tokens, "
                f"{rl.max_response_tokens}"
            )
    if rl.roc_min_positive + rl.roc_min_negative > rl.group_size:
        raise ValueError(f"roc_min_positive + roc_min_negative must be at most group_size, {rl.group_size}")
    if rl.overlong_buffer > rl.max_response_tokens:
        raise ValueError(f"overlong_buffer must be at most max_response_tokens, {rl.max_response_tokens}")


def _check_prompts(rl: "RlSection") -> None:
    """Raise ValueError for keys of the prompt that the format does not allow."""
    keys = {name: getattr(rl, name) for name in ("system_prompt", "question_wrapper", "answer_instruction")}
    given = [name for name, value in keys.items() if value is not None]
    if rl.prompt_format == "released" and given:
        raise ValueError(
            f"{given[0]} cannot be combined with prompt_format: released, whose prompts are fixed; leave it out"
        )
    for name in ("template_options", "chat_template"):
        if getattr(rl, name) and rl.prompt_format != "model":
            raise ValueError(f"{name} requires prompt_format: model")
    if rl.template_options and rl.chat_template:
        raise ValueError("template_options cannot be combined with chat_template, which has no variables")
    if rl.question_wrapper is not None and rl.question_wrapper.count("{question}") != 1:
        raise ValueError("question_wrapper must contain {question} once")


def _check_branching(rl: "RlSection") -> None:
    """Raise ValueError for keys with which rollouts cannot branch."""
    if rl.rollout == "lockstep":
        raise ValueError("branching requires rollout: async (a branch starts in the middle of a lockstep batch)")
    if rl.carry_over:
        raise ValueError("branching cannot be combined with carry_over: set carry_over: false")
    for entry in rl.environments:
        if entry.environment is not None:
            raise ValueError(
                f"branching cannot be combined with environments.{entry.name}.environment, whose state cannot be copied"
            )
    for tool in (*rl.tools, *(tool for entry in rl.environments for tool in entry.tools)):
        if ":" in tool and not NAME.fullmatch(tool):
            raise ValueError(
                f"branching cannot be combined with the tool {tool}: the state of a server cannot be copied"
            )


def _check_mode(rl: "RlSection") -> None:
    """Raise ValueError for keys that the modes one_step_off and async do not allow."""
    if rl.rollout == "lockstep":
        raise ValueError(f"mode: {rl.mode} requires rollout: async")
    if rl.resolved_correction[0] == "none" and not rl.allow_uncorrected:
        raise ValueError(
            f"mode: {rl.mode} trains on rollouts of older weights: set correction (for example tis, with "
            "old_log_probs: trainer), or allow_uncorrected: true"
        )
    if rl.step_time_s is not None or rl.dynamic_sampling:
        name = "dynamic_sampling" if rl.dynamic_sampling else "step_time_s"
        raise ValueError(f"{name} requires mode: sync")
    if rl.resolved_buffer_groups < rl.problems_per_step:
        raise ValueError(f"buffer_groups must be at least problems_per_step, {rl.problems_per_step}")
