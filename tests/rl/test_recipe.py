"""Recipes: the shipped ones load, errors name the key, every key is documented and read."""

import re
from pathlib import Path

import pytest
import torch

from rstar_lab.errors import UserError
from rstar_lab.rl import recipe as recipe_package
from rstar_lab.rl.overrides import RECIPES, load_recipe, parse_overrides
from rstar_lab.rl.recipe import RecipeError, RlSection, Section, Stage
from rstar_lab.rl.recipe.keys import with_key_tables
from rstar_lab.rl.session import read_stage_problems
from rstar_lab.rl.training.update import uses_bf16

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_load_by_path_and_by_name(path):
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
        ("stages.nine.lr=1", "there is no item nine; choose from rl"),
        ("rl.lr=nan", "rl.lr: .*finite number"),
        ("rl.lr=1e400", "rl.lr: .*finite number"),
        ("rl.lr=[", "--set rl.lr=\\[: the value is not YAML"),
        ("sft.problems.synthetic.count=0", "sft.problems.synthetic.count: .*greater than 0"),
        ("sandbox={url: 'http://a:1', isolation: gvisor}", "sandbox: isolation: gvisor is for url: local; start the"),
    ],
)
def test_errors_name_the_key_and_the_nearest_known_one(override, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("tiny", parse_overrides([override]))


def test_error_of_a_missing_problem_file_names_its_key():
    recipe = load_recipe("tiny", {"stages.0.problems": {"file": "none.jsonl"}})
    with pytest.raises(UserError, match=r"stages\.rl\.problems: none\.jsonl: no such file"):
        read_stage_problems(recipe, recipe.stages[0])


def test_unreadable_recipe_files_raise_recipe_errors(tmp_path):
    with pytest.raises(RecipeError, match="shipped recipes: evaluate"):
        load_recipe("no_such_recipe")
    with pytest.raises(RecipeError, match="tiny_fats: no such file; did you mean tiny_fast"):
        load_recipe("tiny_fats")
    with pytest.raises(RecipeError, match="is a folder, not a file"):
        load_recipe(tmp_path)
    for text, message in [("a: [", "not YAML"), ("- 1", "a mapping"), ("name: x", "model: Field required")]:
        (tmp_path / "r.yaml").write_text(text)
        with pytest.raises(RecipeError, match=message):
            load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize("text", ["model: tiny\nseed: 1\nseed: 2\n", "model: tiny\nrl:\n  lr: 1.0e-6\n  lr: 1.0e-3\n"])
def test_a_key_given_twice_is_an_error(tmp_path, text):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"r\.yaml: line \d: key '(seed|lr)' is given twice"):
        load_recipe(tmp_path / "r.yaml")


def test_yaml_anchors_and_merge_keys_still_work(tmp_path):
    (tmp_path / "r.yaml").write_text("model: tiny\nengine: &e {dtype: float32}\nsandbox: {timeout_s: 2.0}\n")
    assert load_recipe(tmp_path / "r.yaml").engine.dtype == "float32"


@pytest.mark.parametrize(
    ("file", "name"), [("my run.yaml", "my_run"), ("größe (2).yaml", "grosse_2"), ("実験.yaml", "recipe")]
)
def test_recipe_file_names_may_hold_spaces_and_umlauts(tmp_path, file, name):
    (tmp_path / file).write_text("model: tiny\n", encoding="utf-8")
    assert load_recipe(tmp_path / file).name == name


def test_stage_keys_override_rl_keys_for_that_stage_only():
    recipe = load_recipe("tiny", parse_overrides(["stages.0.lr=1e-5", "rl.clip_high=0.3"]))
    settings = recipe.settings(recipe.stages[0])
    assert (settings.lr, settings.clip_high) == (1e-5, 0.3)
    assert recipe.rl.lr != 1e-5
    Stage(name="x", problems={"synthetic": {"count": 1}}, steps=1, max_turns=3)


SECTIONS = [
    item
    for item in vars(recipe_package).values()
    if isinstance(item, type) and issubclass(item, Section) and item is not Section
]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_precision_on_a_gpu_is_that_of_the_engine(path):
    recipe = load_recipe(path)
    for stage in recipe.stages:
        bf16 = uses_bf16(recipe.settings(stage), torch.device("cuda"))
        assert bf16 == (recipe.engine.dtype == "bfloat16"), "another precision exceeds the mismatch limit"
        assert not uses_bf16(recipe.settings(stage), torch.device("cpu")) or recipe.settings(stage).precision == "bf16"


def test_bf16_with_a_float32_engine_is_refused_before_the_sft():
    with pytest.raises(RecipeError, match=r"rl\.precision: bf16 exceeds the mismatch limit"):
        load_recipe("tiny_fast", {"rl.precision": "bf16"})
    recipe = load_recipe("tiny_fast", {"rl.precision": "bf16", "engine.mismatch_limit": 0.1})
    assert recipe.settings(recipe.stages[0]).precision == "bf16"


def test_every_key_is_read_somewhere():
    files = [
        path
        for path in (ROOT / "rstar_lab").rglob("*.py")
        if path.parent.name != "recipe" or path.name in ("rl.py", "rl_checks.py")
    ]
    code = "\n".join(path.read_text() for path in files)
    for section in SECTIONS:
        for key in section.model_fields:
            read = rf"\.{key}\b|\"{key}\"|getattr\(.*{key}"
            assert re.search(read, code), f"nothing reads {section.__name__}.{key}"


def test_every_key_has_a_description():
    missing = [
        f"{section.__name__}.{key}"
        for section in SECTIONS
        for key, field in section.model_fields.items()
        if not field.description
    ]
    assert missing == []


def test_key_tables_in_docs_are_current():
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert with_key_tables(page) == page, "run: make docs-keys"


def test_rl_defaults_are_those_of_the_paper():
    rl = RlSection()
    assert (rl.problems_per_step, rl.group_size, rl.oversample) == (512, 16, 2)
    assert (rl.clip_low, rl.clip_high, rl.lr, rl.warmup_steps, rl.temperature) == (0.2, 0.28, 1e-6, 20, 1.0)
    assert (rl.roc, rl.max_turns) == ("paper", 10)
