"""Nothing in the recipe of a stored run chooses what is executed or where this machine connects."""

import json

import pytest
from helpers.cases import read_cases
from hypothesis import given
from hypothesis import strategies as st

from rstar_lab.rl.overrides import load_recipe, parse_stored_recipe
from rstar_lab.rl.recipe import Recipe
from rstar_lab.runs.info import read_info
from rstar_lab.untrusted.files import DataError
from rstar_lab.untrusted.recipes import ForeignRecipe

BASE = {"model": "tiny", "stages": [{"name": "one", "steps": 1}]}
NAMED = read_cases(__file__, "recipes.yaml")["named"]


@pytest.mark.parametrize("kind", NAMED)
def test_a_name_in_a_foreign_recipe_is_refused_until_the_user_names_it(kind):
    changes, name = NAMED[kind]
    recipe = ForeignRecipe(BASE | changes)
    with pytest.raises(DataError, match=r"the recipe of run r names .*name them: functions=") as caught:
        parse_stored_recipe(recipe, "run r", rollouts=True)
    assert name in str(caught.value)
    assert recipe.accept("run r", [name]) == BASE | changes


KEYS = ["reward", "tools", "urls", "url", "method", "type", "environment", "teacher_url", "model", "metrics", "x"]


@given(st.sampled_from(KEYS), st.text(), st.text(), st.booleans())
def test_every_text_with_a_colon_is_refused_in_every_place(key, before, after, nested):
    value = [{"rl": {key: f"{before}:{after}"}}] if nested else f"{before}:{after}"
    with pytest.raises(DataError):
        ForeignRecipe({key: value}).accept("run r")


def test_texts_of_prompts_and_local_recipes_are_accepted():
    prompt = {"format": "paper", "system_prompt": "Answer: yes"}
    labelled = {"model": "tiny", "label": "a:b", "rl": {"prompt": prompt}}
    assert parse_stored_recipe(ForeignRecipe(labelled), "run r").rl.prompt.system_prompt == "Answer: yes"
    tiny = load_recipe("tiny_fast").model_dump(mode="json")
    assert parse_stored_recipe(ForeignRecipe(tiny), "run r", rollouts=True) == Recipe.model_validate(tiny)


def test_a_stored_recipe_is_no_recipe(tmp_path):
    stored = {"schema_version": 1, "run_id": "a", "kind": "train", "status": "finished", "recipe": BASE}
    (tmp_path / "run.json").write_text(json.dumps(stored))
    recipe = read_info(tmp_path)["recipe"]
    for use in (dict, Recipe.model_validate, lambda value: value | {}, lambda value: value["rl"], json.dumps):
        with pytest.raises((TypeError, ValueError)):
            use(recipe)
    assert recipe.get("stages")[0]["name"] == "one" and recipe.get("rl.answer", "tagged") == "tagged"
