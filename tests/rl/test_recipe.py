"""Recipes: the shipped ones load, errors name the key, every key is documented and read."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.cases import read_cases

from rstar_lab.common.errors import UserError
from rstar_lab.rl.methods import Grpo, Maxrl, UserMethod
from rstar_lab.rl.methods.echo import Echo
from rstar_lab.rl.methods.void_turns import VoidTurns
from rstar_lab.rl.overrides import RECIPES, load_recipe, parse_overrides, parse_recipe
from rstar_lab.rl.recipe import RecipeError, RlSection, Section
from rstar_lab.rl.recipe.explain import RELEASE_KEYS, advice
from rstar_lab.rl.resolved import read_stage_problems
from rstar_lab.rl.training.update import uses_bf16

ROOT = Path(__file__).parent.parent.parent
CASES = read_cases(__file__, "recipe_errors.yaml")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_load_by_path_and_by_name(path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert load_recipe(path.stem) == recipe


@pytest.mark.parametrize(("override", "message"), CASES["errors"] + CASES["typed sections"])
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


@pytest.mark.parametrize(
    ("file", "name"), [("my run.yaml", "my_run"), ("größe (2).yaml", "gr_e_2"), ("実験.yaml", "recipe")]
)
def test_recipe_file_names_may_hold_spaces_and_umlauts(tmp_path, file, name):
    (tmp_path / file).write_text("model: tiny\n", encoding="utf-8")
    assert load_recipe(tmp_path / file).name == name


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Grpo()),
        ({"clip_low": 0.1}, Grpo(clip_low=0.1)),
        ({"type": "maxrl", "loss": "gspo"}, Maxrl(loss="gspo")),
        ({"type": "mine:advantage"}, UserMethod(type="mine:advantage")),
        ({"add": [{"type": "echo", "weight": 0.1}]}, Grpo(add=(Echo(weight=0.1),))),
    ],
)
def test_the_type_selects_the_section_and_survives_a_dump(keys, expected):
    rl = RlSection(method=keys)
    assert rl.method == expected and type(rl.method) is type(expected)
    assert RlSection(**rl.model_dump()) == rl == RlSection.model_validate_json(rl.model_dump_json())


def test_set_reaches_the_keys_of_sections_and_of_added_methods():
    pairs = ["rl.method.roc.rule=random", "rl.method.add=[{type: echo, weight: 0.1}, {type: void_turns}]"]
    rl = load_recipe("tiny", parse_overrides([*pairs, "rl.method.add.echo.weight=0.2"])).rl
    assert (rl.method.roc.rule, rl.method.roc.oversample) == ("random", 2)
    assert rl.method.add == (Echo(weight=0.2), VoidTurns())


def test_another_type_of_a_section_keeps_only_the_keys_that_it_has():
    """`tiny_fast` sets `rl.schedule.lockstep`, which only the type sync has."""
    more = ["rl.old_log_probs=trainer", "rl.correction.type=tis", "rl.schedule.max_staleness=2"]
    rl = load_recipe("tiny_fast", parse_overrides(["rl.schedule.type=async", *more])).rl
    assert (rl.schedule.type, rl.schedule.max_staleness, rl.correction.type) == ("async", 2, "tis")
    for pair in ("rl.method.type=maxrl", "rl.schedule.type=sync"):
        rl = load_recipe("tiny_fast", parse_overrides([pair])).rl
        assert rl.method.roc.oversample == 2 and rl.schedule.lockstep


@pytest.mark.parametrize(("key", "words"), CASES["keys of the release"].items())
def test_other_forms_of_names_of_the_release_are_explained(key, words):
    with pytest.raises(RecipeError, match=words):
        load_recipe("release_dapo", parse_overrides([f"{key}=5"]))


def test_every_key_of_the_scripts_of_the_release_has_an_answer():
    keys = [f"{section}.{key}" for section, names in CASES["scripts of the release"].items() for key in names.split()]
    assert len(keys) == 63 and [key for key in keys if advice(key) is None] == []


def test_keys_of_the_release_are_known_as_the_page_shortens_them():
    """The left column of the table of settings, with and without the sections of verl, is answered with the right column."""
    page = (Path(__file__).parents[2] / "docs/coming-from-rstar.md").read_text().partition("## Settings")[2]
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 15
    for left, right in rows:
        for name in re.findall(r"`([\w.]+)(?:=\w+)?`", left):
            for key in (name, f"actor_rollout_ref.{name}"):
                with pytest.raises(RecipeError, match="a key of microsoft/rStar") as error:
                    load_recipe("release_dapo", {key: "1"})
                named = re.findall(r"`((?:rl|evaluate|stages|engine)\.[\w.]*\w)", right)
                assert not named or any(part in str(error.value) for part in named), (key, named, str(error.value))


def test_advice_on_keys_of_the_release_names_keys_that_exist():
    recipe, named = load_recipe("release_dapo"), 0
    for text in RELEASE_KEYS.values():
        for key in re.findall(r"\b(?:rl|evaluate|stages\.0)\.[\w.]*\w", text):
            here = recipe
            for part in key.split("."):
                here = here[int(part)] if part.isdigit() else getattr(here, part)
            named += 1
    assert named > 30


def test_a_stage_changes_single_keys_and_another_type_replaces_a_section():
    stages = [
        {"limits": {"max_turns": 3}, "method": {"roc": {"rule": "random"}}},
        {"method": {"type": "maxrl"}, "correction": {"type": "geo_mask"}, "schedule": {"type": "async"}},
    ]
    problems = {"synthetic": {"count": 1}}
    stages = [{"name": str(i), "steps": 1, "problems": problems} | stage for i, stage in enumerate(stages)]
    rl = {
        "limits": {"max_response_tokens": 99, "max_turns": 5}, "method": {"clip_low": 0.1, "roc": {"oversample": 3}},
        "correction": {"type": "tis", "bounds": [0, 9]}, "schedule": {"lockstep": True},
    }  # fmt: skip
    recipe = parse_recipe({"name": "r", "model": "tiny", "rl": rl, "stages": stages})
    first, second = map(recipe.settings, recipe.stages)
    assert (first.limits.max_response_tokens, first.limits.max_turns) == (99, 3)
    assert (first.method.clip_low, first.method.roc.oversample, first.method.roc.rule) == (0.1, 3, "random")
    assert first.correction == recipe.rl.correction
    assert second.method == Maxrl() and second.limits == recipe.rl.limits
    assert second.resolved_correction == ("geo_mask", (0.999, 1.001))
    assert second.schedule.type == "async"


def subclasses(section):
    for found in section.__subclasses__():
        yield from (found, *subclasses(found))


SECTIONS = [section for section in subclasses(Section) if section.__module__.startswith("rstar_lab.rl.")]


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


# Number of keys of each core section. Never increase one: a method has a file in rl/methods (CONTRIBUTING.md).
CORE_KEYS = {
    "Recipe": 14, "RlSection": 31, "LimitsSection": 7, "Method": 7, "Sync": 5, "OneStepOff": 2, "Async": 5,
    "EngineSection": 12, "SandboxSection": 6, "EvaluateSection": 7, "SftSection": 20, "Stage": 7,
}  # fmt: skip


def test_core_sections_get_no_new_key():
    counts = {section.__name__: len(section.model_fields) for section in SECTIONS if section.__name__ in CORE_KEYS}
    grown = {name: count for name, count in counts.items() if count > CORE_KEYS[name]}
    assert counts.keys() == CORE_KEYS.keys() and not grown, "a new key in a core section: see CONTRIBUTING.md"


def test_every_key_is_read_somewhere():
    lines = []
    for path in (ROOT / "rstar_lab").rglob("*.py"):  # descriptions of keys in rl/recipe name other keys
        in_recipe = path.parent.name == "recipe"
        lines += [
            line for line in path.read_text().splitlines() if "self." in line or "texts." in line or not in_recipe
        ]
    code = "\n".join(lines)
    for section in SECTIONS:
        for key in section.model_fields:
            read = rf"\.{key}\b|\"{key}\"|getattr\(.*{key}"
            assert re.search(read, code), f"nothing reads {section.__name__}.{key}"


def test_every_key_has_a_description():
    for section in SECTIONS:
        assert [key for key, field in section.model_fields.items() if not field.description] == [], section


def test_key_tables_in_docs_are_current(tmp_path):
    page, copy = ROOT / "docs" / "recipe-keys.md", tmp_path / "page.md"
    copy.write_text(page.read_text())
    subprocess.run([sys.executable, ROOT / "docs" / "key_tables.py", copy], check=True)
    assert copy.read_text() == page.read_text(), "run: make docs-keys"


def test_rl_defaults_are_those_of_the_paper():
    rl = RlSection()
    assert (rl.problems_per_step, rl.group_size, rl.method.roc.oversample) == (512, 16, 2)
    assert (rl.method.clip_low, rl.method.clip_high, rl.lr, rl.warmup_steps) == (0.2, 0.28, 1e-6, 20)
    assert rl.temperature == 1.0
    assert (rl.method.roc.rule, rl.limits.max_turns) == ("paper", 10)
