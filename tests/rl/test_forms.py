"""The form for the keys of a recipe."""

import pytest
from ipywidgets.widgets import widget

from rstar_lab.rl.forms import MOST_SHOWN, RecipeForm
from rstar_lab.rl.overrides import load_recipe, parse_overrides


def test_the_form_has_the_keys_of_the_types_that_the_recipe_selects():
    form = RecipeForm("release_dapo")  # prompt: {format: released}
    assert "rl.prompt.format" in form.keys and "rl.prompt.system_prompt" not in form.keys
    for key in form.keys:
        form.field(key)
    form.field("rl.method.roc.rule").value = "paper"
    assert form.overrides == {"rl.method.roc.rule": "paper"} and form.recipe.rl.method.roc.rule == "paper"


@pytest.mark.parametrize("name", ["tiny_fast", "evaluate", "qwen3_14b_mi300x"])
def test_the_form_has_every_key_and_changes_nothing_by_itself(name):
    form = RecipeForm(name)
    assert form.recipe == load_recipe(name) and form.overrides == {} and form.message.value == ""
    recipe = form.recipe.model_dump(mode="json")
    for section in ("rl", "sft", "engine", "sandbox", "evaluate"):
        for key, value in (recipe[section] or {}).items():
            if not isinstance(value, dict):
                below = f"{section}.{key}."  # of a section that the recipe does not have
                assert f"{section}.{key}" in form.keys or any(name.startswith(below) for name in form.keys)
    for stage in recipe["stages"]:
        assert f"stages.{stage['name']}.steps" in form.keys


def test_a_change_is_an_override_that_the_command_line_reads_alike():
    form = RecipeForm("tiny_fast")
    for key, value in {
        "rl.lr": "1e-4",
        "rl.method.roc.rule": "released",
        "stages.rl.steps": "9",
        "rl.tools": "[python]",
    }.items():
        form.field(key).value = value
    assert form.overrides == parse_overrides(["rl.lr=1e-4", "rl.method.roc.rule=released", "stages.rl.steps=9"]), (
        "tools is unchanged"
    )
    assert form.recipe == load_recipe("tiny_fast", form.overrides)
    assert "--set rl.lr=0.0001" in form.command.value
    form.field("rl.lr").value = RecipeForm("tiny_fast").field("rl.lr").value
    assert "rl.lr" not in form.overrides


def test_a_wrong_value_is_an_error_at_its_key_until_it_is_corrected():
    form = RecipeForm("tiny_fast")
    form.field("rl.group_size").value = "0"
    assert form.recipe is None and "rl.group_size: " in form.message.value and form.command.value == ""
    form.section.value = "rl"
    notes = dict(zip(form.shown(), [row.children[1].value for row in form.body.children], strict=True))
    assert "not valid" in notes["rl.group_size"] and "<b>" not in notes["rl.lr"]
    form.field("rl.group_size").value = "16"
    assert form.recipe.rl.group_size == 16 and form.message.value == ""


def test_search_finds_keys_of_all_sections_and_texts():
    form = RecipeForm("tiny_fast")
    form.section.value = "engine"
    assert len(form.body.children) == len(form.shown()) and all(key.startswith("engine.") for key in form.shown())
    form.search.value = "max_response_tokens"
    assert {"rl.limits.max_response_tokens", "evaluate.max_response_tokens"} <= set(form.shown())
    assert "rl.lr" not in form.shown() and form.found.value == ""


def test_a_new_form_has_few_widgets_and_a_search_shows_a_part_of_many_keys():
    before = len(widget._instances)
    form = RecipeForm("qwen3_14b_mi300x")
    assert len(widget._instances) - before < 200, "each one is a message to the browser"
    form.search.value = "e"
    assert len(form.shown()) > MOST_SHOWN == len(form.body.children)
    assert form.found.value == f"{MOST_SHOWN} of {len(form.shown())} keys that match are shown."
