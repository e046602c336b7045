"""Keys of older versions: every one is refused with its new place, and stored recipes are converted."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from rstar_lab.common.old_recipes import RENAMED, RENAMED_ENGINE, upgraded
from rstar_lab.rl.overrides import load_recipe, parse_overrides, parse_recipe
from rstar_lab.rl.recipe import Recipe, RecipeError, RlSection
from rstar_lab.rl.section import Section
from rstar_lab.runs.reader import RunReader

GOLDEN = Path(__file__).parents[2] / "golden" / "runs"
# The flat keys of `rl` of an old run with all options at their defaults.
DEFAULTS: dict[str, Any] = {
    "oversample": 2, "roc": "paper", "roc_penalties": ["errors", "format"], "roc_min_positive": 0, "roc_min_negative": 0,
    "clip_low": 0.2, "clip_high": 0.28, "variant": "grpo", "aggregation": "token-mean", "advantage": "group",
    "normalise_std": True, "max_response_tokens": 8192, "max_turns": 10, "max_calls_per_turn": 8, "max_tool_chars": 4096,
    "tool_truncate_side": "middle", "prompt_format": "paper", "system_prompt": None, "question_wrapper": None,
    "answer_instruction": None, "template_options": {}, "chat_template": None, "time_limit_s": None, "step_time_s": None,
    "carry_over": False, "mode": "sync", "max_staleness": 1, "when_stale": "wait", "buffer_groups": None,
    "allow_uncorrected": False, "rollout": "async", "tool_timeout_s": 30.0, "importance_cap": None, "correction": "none",
    "correction_bounds": None, "max_corrected_share": 0.5, "kl_coefficient": 0.0, "teacher_weight": 0.0,
    "self_distillation": 0.0, "tool_output_loss": 0.0, "overlong_buffer": 0, "tool_budget": 0.0, "tool_budget_from": 0.5,
    "drop_void_turns": False, "drop_control_tokens": False, "branching": None, "dynamic_sampling": 0,
}  # fmt: skip


def exists(place: str) -> bool:
    """Return whether a dotted key exists in `rl`, for some type of each section."""
    sections: list[Any] = [RlSection]
    for part in place.split("."):
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        if not fields:
            return False
        sections = [model for field in fields for model in (*get_args(field.annotation), field.annotation)]
        sections = [model for model in sections if isinstance(model, type) and issubclass(model, Section)]
    return True


@pytest.mark.parametrize("key", RENAMED)
def test_every_old_key_is_an_error_that_names_a_place_that_exists(key):
    assert exists(RENAMED[key])
    for override, prefix, new in ((f"rl.{key}=1", "rl", "rl."), (f"stages.0.{key}=1", r"stages\.0", "")):
        with pytest.raises(RecipeError, match=rf"{prefix}\.{key}: this key is now {new}{RENAMED[key]}\b"):
            load_recipe("tiny", parse_overrides([override]))


def test_the_table_has_every_old_key():
    assert RENAMED.keys() == DEFAULTS.keys() - {"correction"}


@pytest.mark.parametrize("key", RENAMED_ENGINE)
def test_renamed_engine_keys_are_errors(key):
    with pytest.raises(RecipeError, match=rf"engine\.{key}: this key is now engine\.{RENAMED_ENGINE[key]}"):
        load_recipe("tiny", {f"engine.{key}": 1})


def test_a_correction_as_text_is_an_error_with_the_new_form():
    with pytest.raises(RecipeError, match=r"rl\.correction: give a mapping such as \{type: tis\}"):
        load_recipe("tiny", {"rl.correction": "tis"})


def test_default_values_of_an_old_run_are_the_defaults():
    recipe = parse_recipe(upgraded({"model": "tiny", "rl": DEFAULTS}))
    assert recipe == Recipe(model="tiny", name=recipe.name)
    assert upgraded(recipe.model_dump(mode="json")) == recipe.model_dump(mode="json")


OLD = [
    ({"importance_cap": 3.0}, {"correction": {"type": "tis", "bounds": [0, 3]}}),
    ({"correction": "icepop", "correction_bounds": [0.4, 4.0]}, {"correction": {"type": "icepop", "bounds": [0.4, 4]}}),
    ({"correction": "m:f", "max_corrected_share": 0.2}, {"correction": {"type": "m:f", "max_share": 0.2}}),
    ({"advantage": "maxrl", "variant": "gspo"}, {"method": {"type": "maxrl", "loss": "gspo"}}),
    ({"advantage": "m:f", "normalise_std": False}, {"method": {"type": "m:f"}}),
    ({"normalise_std": False}, {"method": {"normalise_std": False}}),
    ({"roc": "released", "roc_min_positive": 2}, {"method": {"roc": {"rule": "released", "min_positive": 2}}}),
    ({"rollout": "lockstep"}, {"schedule": {"lockstep": True}}),
    (
        {"mode": "async", "max_staleness": 3, "allow_uncorrected": True},
        {"schedule": {"type": "async", "max_staleness": 3, "allow_uncorrected": True}},
    ),
    (
        {"mode": "one_step_off", "correction": "tis"},
        {"schedule": {"type": "one_step_off"}, "correction": {"type": "tis"}},
    ),
    ({"prompt_format": "released"}, {"prompt": {"format": "released"}}),
    (
        {"prompt_format": "model", "template_options": {"a": 1}, "system_prompt": "s"},
        {"prompt": {"format": "model", "template_options": {"a": 1}, "system_prompt": "s"}},
    ),
    ({"tool_output_loss": 0.1}, {"method": {"add": [{"type": "echo", "weight": 0.1}]}}),
    ({"self_distillation": 0.1}, {"method": {"add": [{"type": "sdpo", "weight": 0.1}]}}),
    ({"overlong_buffer": 9}, {"method": {"add": [{"type": "overlong_buffer", "tokens": 9}]}}),
    (
        {"tool_budget": 0.1, "tool_budget_from": 0.7},
        {"method": {"add": [{"type": "tool_budget", "weight": 0.1, "easy_from": 0.7}]}},
    ),
    (
        {"drop_void_turns": True, "drop_control_tokens": True, "branching": 0.0},
        {"method": {"add": [{"type": "void_turns"}, {"type": "control_tokens"}, {"type": "branching", "entropy": 0}]}},
    ),
    ({"max_turns": 3, "tool_timeout_s": 4.0}, {"limits": {"max_turns": 3, "tool_timeout_s": 4.0}}),
]


@pytest.mark.parametrize(("old", "new"), OLD)
def test_old_values_keep_their_meaning(old, new):
    """Also as changes of a stage, and in the complete recipe that a run stores."""
    expected = parse_recipe({"name": "r", "model": "tiny", "rl": new}).rl
    for stored in (old, DEFAULTS | old):
        assert parse_recipe(upgraded({"name": "r", "model": "tiny", "rl": stored})).rl == expected
    if "prompt_format" not in old:
        stage = {"name": "one", "steps": 1, "problems": {"synthetic": {"count": 1}}, "rl": old}
        recipe = parse_recipe(upgraded({"name": "r", "model": "tiny", "rl": DEFAULTS, "stages": [stage]}))
        assert recipe.rl == RlSection() and recipe.settings(recipe.stages[0]) == expected


def test_opd_of_an_old_run_keeps_its_weight():
    recipe = upgraded({"rl": DEFAULTS | {"teacher_weight": 0.3}})
    assert recipe["rl"]["method"]["add"] == [{"type": "opd", "weight": 0.3}]


def test_golden_runs_are_read_with_the_present_keys():
    stored = json.loads((GOLDEN / "tiny_fast-rl" / "run.json").read_text())["recipe"]
    assert stored["rl"]["roc"] == "paper" and stored["engine"]["max_batch"] == 256
    recipe = RunReader(GOLDEN / "tiny_fast-rl").info["recipe"]
    rl = parse_recipe({key: recipe[key] for key in ("name", "model", "rl", "stages", "engine")}).rl
    assert (rl.sync.lockstep, rl.limits.max_response_tokens, rl.limits.max_tool_chars) == (True, 160, 200)
    assert recipe["engine"]["max_num_seqs"] == 256 and "max_batch" not in recipe["engine"]
