"""Recipes: what ships is whole, what is wrong is named, and no key is read by nobody."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from rstar_lab.rl import recipe as module
from rstar_lab.rl.overrides import RECIPES, load_recipe, parse_overrides
from rstar_lab.rl.recipe import Recipe, RecipeError, RlSection, Stage

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_that_ships_can_be_read(path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert load_recipe(path.stem) == recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.clip_lo=0.1", "rl.clip_lo: unknown key; did you mean clip_low"),
        ("stages.0.step=3", "stages.0.step: unknown key; did you mean steps"),
        ("enginee.count=1", "enginee: unknown key; did you mean engine"),
        ("rl.lr=fast", "rl.lr: .*number"),
        ("rl.roc=papper", "rl.roc: .*'paper'"),
        ("stages.0.lr=fast", "lr: .*number"),
        ("stages.nine.lr=1", "there is no item nine"),
        ("sft.problems.synthetic.count=0", "sft.problems.synthetic.count: .*greater than 0"),
    ],
)
def test_what_is_wrong_is_named(override, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("tiny", parse_overrides([override]))


def test_broken_files_are_one_clear_error(tmp_path):
    with pytest.raises(RecipeError, match="none that ships"):
        load_recipe("no_such_recipe")
    for text, message in [("a: [", "not YAML"), ("- 1", "a mapping"), ("name: x", "model: Field required")]:
        (tmp_path / "r.yaml").write_text(text)
        with pytest.raises(RecipeError, match=message):
            load_recipe(tmp_path / "r.yaml")


def test_a_stage_changes_any_key_of_rl_and_leaves_the_rest():
    recipe = load_recipe("tiny", parse_overrides(["stages.0.lr=1e-5", "rl.clip_high=0.3"]))
    settings = recipe.settings(recipe.stages[0])
    assert (settings.lr, settings.clip_high) == (1e-5, 0.3)
    assert recipe.rl.lr != 1e-5
    Stage(name="x", problems={"synthetic": {"count": 1}}, steps=1, max_turns=3)


def sections(model: type[BaseModel], seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    seen.add(model)
    for kind in vars(module).values():
        if (
            isinstance(kind, type)
            and issubclass(kind, module.Section)
            and kind not in seen
            and kind is not module.Section
        ):
            sections(kind, seen)
    return seen


def test_every_key_is_read_somewhere():
    code = "\n".join(path.read_text() for path in (ROOT / "rstar_lab").rglob("*.py") if path.name != "recipe.py")
    for section in sections(Recipe, set()):
        for key in section.model_fields:
            read = rf"\.{key}\b|\"{key}\"|getattr\(.*{key}"
            assert re.search(read, code), f"nothing reads {section.__name__}.{key}"


def test_paper_defaults():
    rl = RlSection()
    assert (rl.problems_per_step, rl.group_size, rl.oversample) == (512, 16, 2)
    assert (rl.clip_low, rl.clip_high, rl.lr, rl.warmup_steps, rl.temperature) == (0.2, 0.28, 1e-6, 20, 1.0)
    assert (rl.roc, rl.max_turns) == ("paper", 10)
