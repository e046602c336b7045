"""Recipe keys that have moved, and the conversion of the recipe of an older run.

In older versions all keys of the methods, the schedule, the prompt and the limits were keys of `rl`. A recipe with such a key is
refused with the new place; the recipe stored in run.json is converted when it is read.
"""

from collections.abc import Mapping
from typing import Any

# Old key of `rl` or of a stage -> new key.
RENAMED = {
    "oversample": "method.roc.oversample",
    "roc": "method.roc.rule",
    "roc_penalties": "method.roc.penalties",
    "roc_min_positive": "method.roc.min_positive",
    "roc_min_negative": "method.roc.min_negative",
    "clip_low": "method.clip_low",
    "clip_high": "method.clip_high",
    "variant": "method.loss",
    "aggregation": "method.aggregation",
    "normalise_std": "method.normalise_std",
    "kl_coefficient": "method.kl_coefficient",
    "advantage": "method.type",
    "max_response_tokens": "limits.max_response_tokens",
    "max_turns": "limits.max_turns",
    "max_calls_per_turn": "limits.max_calls_per_turn",
    "max_tool_chars": "limits.max_tool_chars",
    "tool_truncate_side": "limits.tool_truncate_side",
    "time_limit_s": "limits.time_limit_s",
    "tool_timeout_s": "limits.tool_timeout_s",
    "prompt_format": "prompt.format",
    "system_prompt": "prompt.system_prompt",
    "question_wrapper": "prompt.question_wrapper",
    "answer_instruction": "prompt.answer_instruction",
    "template_options": "prompt.template_options",
    "chat_template": "prompt.chat_template",
    "mode": "schedule.type",
    "rollout": "schedule.lockstep",
    "step_time_s": "schedule.step_time_s",
    "carry_over": "schedule.carry_over",
    "dynamic_sampling": "schedule.dynamic_sampling",
    "max_staleness": "schedule.max_staleness",
    "when_stale": "schedule.when_stale",
    "buffer_groups": "schedule.buffer_groups",
    "allow_uncorrected": "schedule.allow_uncorrected",
    "importance_cap": "correction",
    "correction_bounds": "correction.bounds",
    "max_corrected_share": "correction.max_share",
    "tool_output_loss": "method.add",
    "teacher_weight": "method.add",
    "self_distillation": "method.add",
    "overlong_buffer": "method.add",
    "tool_budget": "method.add",
    "tool_budget_from": "method.add",
    "drop_void_turns": "method.add",
    "drop_control_tokens": "method.add",
    "branching": "method.add",
}
# How to write an old key whose value changes too.
EXAMPLES = {
    "advantage": "grpo instead of group",
    "rollout": "true instead of lockstep",
    "importance_cap": "{type: tis, bounds: [0, X]}",
    "tool_output_loss": "[{type: echo, weight: X}]",
    "teacher_weight": "[{type: opd, weight: X}]",
    "self_distillation": "[{type: sdpo, weight: X}]",
    "overlong_buffer": "[{type: overlong_buffer, tokens: N}]",
    "tool_budget": "[{type: tool_budget, weight: X}]",
    "tool_budget_from": "[{type: tool_budget, weight: X, easy_from: Y}]",
    "drop_void_turns": "[{type: void_turns}]",
    "drop_control_tokens": "[{type: control_tokens}]",
    "branching": "[{type: branching, entropy: X}]",
}
RENAMED_ENGINE = {"memory_share": "gpu_memory_utilization", "max_batch": "max_num_seqs"}

_SYNC = ("step_time_s", "carry_over", "dynamic_sampling")
_ASYNC = ("max_staleness", "when_stale", "buffer_groups")
_TEXTS = ("system_prompt", "question_wrapper", "answer_instruction")
_MODEL = ("template_options", "chat_template")


def upgraded(recipe: Any) -> Any:
    """Return the recipe of a run of any version with the present keys. A recipe without old keys is returned unchanged."""
    if not isinstance(recipe, Mapping):
        return recipe
    new = dict(recipe)
    rl, stages, engine = recipe.get("rl"), recipe.get("stages"), recipe.get("engine")
    flat = dict(rl) if isinstance(rl, Mapping) else {}
    if _is_old(flat):
        new["rl"] = _nested(flat)
    if isinstance(stages, list):
        new["stages"] = [_stage(stage, flat) for stage in stages]
    if isinstance(engine, Mapping):
        new["engine"] = {RENAMED_ENGINE.get(key, key): value for key, value in engine.items()}
    return new


def _is_old(keys: Mapping[str, Any]) -> bool:
    return bool(keys.keys() & RENAMED.keys()) or isinstance(keys.get("correction"), str)


def _stage(stage: Any, rl: dict[str, Any]) -> Any:
    """Return a stage with the present keys. rl: the old keys of `rl`, which decide what the keys of the stage mean."""
    changes = stage.get("rl") if isinstance(stage, Mapping) else None
    if not isinstance(changes, Mapping) or not _is_old(changes):
        return stage
    sections = {(RENAMED.get(key) or str(key)).partition(".")[0] for key in changes}
    nested = _nested(rl | dict(changes))
    return {**stage, "rl": {section: nested[section] for section in sections if section in nested}}


def _nested(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of the keys of an old `rl` section. Keys that belong to another type had no effect and are left out."""
    new: dict[str, Any] = {key: value for key, value in old.items() if key not in RENAMED and key != "correction"}
    method: dict[str, Any] = {}
    for key in ("clip_low", "clip_high", "variant", "aggregation", "kl_coefficient"):
        if key in old:
            method[RENAMED[key].rpartition(".")[2]] = old[key]
    roc = {RENAMED[key].rpartition(".")[2]: old[key] for key in old if RENAMED.get(key, "").startswith("method.roc.")}
    if roc:
        method["roc"] = roc
    kind = {"group": "grpo"}.get(old.get("advantage", "group"), old.get("advantage"))
    if "advantage" in old:
        method["type"] = kind
    if "normalise_std" in old and kind == "grpo":
        method["normalise_std"] = old["normalise_std"]
    if added := _added(old):
        method["add"] = added
    if method:
        new["method"] = method
    if limits := {key: old[key] for key in old if RENAMED.get(key) == f"limits.{key}"}:
        new["limits"] = limits
    for section, keys in (("correction", _correction(old)), ("schedule", _schedule(old)), ("prompt", _prompt(old))):
        if keys:
            new[section] = keys
    return new


def _added(old: Mapping[str, Any]) -> list[dict[str, Any]]:
    added: list[dict[str, Any]] = [
        {"type": kind, "weight": old[key]}
        for key, kind in (("tool_output_loss", "echo"), ("teacher_weight", "opd"), ("self_distillation", "sdpo"))
        if old.get(key)
    ]
    if old.get("overlong_buffer"):
        added.append({"type": "overlong_buffer", "tokens": old["overlong_buffer"]})
    if old.get("tool_budget"):
        budget = {"type": "tool_budget", "weight": old["tool_budget"]}
        added.append(budget | ({"easy_from": old["tool_budget_from"]} if "tool_budget_from" in old else {}))
    for key, kind in (("drop_void_turns", "void_turns"), ("drop_control_tokens", "control_tokens")):
        if old.get(key):
            added.append({"type": kind})
    if old.get("branching") is not None:
        added.append({"type": "branching", "entropy": old["branching"]})
    return added


def _correction(old: Mapping[str, Any]) -> dict[str, Any]:
    share = {"max_share": old["max_corrected_share"]} if "max_corrected_share" in old else {}
    if old.get("importance_cap") is not None:
        return {"type": "tis", "bounds": [0.0, old["importance_cap"]]} | share
    if not isinstance(old.get("correction"), str) or old["correction"] == "none":
        return {"type": "none"} if "correction" in old else {}
    bounds = {"bounds": old["correction_bounds"]} if old.get("correction_bounds") is not None else {}
    return {"type": old["correction"]} | bounds | share


def _schedule(old: Mapping[str, Any]) -> dict[str, Any]:
    mode = old.get("mode", "sync")
    if mode == "sync":
        keys = {key: old[key] for key in _SYNC if key in old}
        if "rollout" in old:
            keys["lockstep"] = old["rollout"] == "lockstep"
    else:
        keys = {key: old[key] for key in (*(_ASYNC if mode == "async" else ()), "allow_uncorrected") if key in old}
    return {"type": mode} | keys if keys or "mode" in old else {}


def _prompt(old: Mapping[str, Any]) -> dict[str, Any]:
    form = old.get("prompt_format", "paper")
    names = {"paper": _TEXTS, "model": (*_TEXTS, *_MODEL)}.get(form, ())
    keys = {key: old[key] for key in names if key in old}
    return {"format": form} | keys if keys or "prompt_format" in old else {}
