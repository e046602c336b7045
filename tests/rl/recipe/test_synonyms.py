"""Words of other trainers lead to our keys, values of the wrong kind to how they are written, and no hint is far-fetched."""

import pytest
from helpers.cases import read_cases

from rstar_lab.rl.overrides import load_recipe, parse_overrides
from rstar_lab.rl.recipe import RecipeError
from rstar_lab.rl.recipe.explain import SYNONYMS, synonym_line
from rstar_lab.rl.recipe.keys import find_keys

CASES = read_cases(__file__)
KEYS = {row["key"].replace("stages[]", "stages.0") for row in find_keys("")}


def message(key: str, value: object = 8) -> str:
    with pytest.raises(RecipeError) as error:
        load_recipe("tiny_fast", {key: value})
    return str(error.value)


@pytest.mark.parametrize("word", SYNONYMS)
def test_every_word_leads_to_keys_that_exist(word):
    assert synonym_line(f"rl.{word}") or synonym_line(word)
    if not SYNONYMS[word].startswith("- "):
        # A section that occurs twice is listed once.
        listed = SYNONYMS[word].replace("stages.0.problems.", "sft.problems.").replace("rl.lora.", "sft.lora.")
        assert set(listed.split(", ")) <= KEYS


@pytest.mark.parametrize(("key", "ours"), CASES["words of other trainers"].items())
def test_a_word_of_another_trainer_names_our_key(key, ours):
    assert f"{key}: unknown key; here it is {ours}" in message(key) + "$" and f"{ours}$" in message(key) + "$"


@pytest.mark.parametrize("key", ["rl.entropy_coef", "rl.lora_dropout", "rl.attn_implementation", "rl.resume"])
def test_a_word_without_a_counterpart_says_so(key):
    assert f"{key}: unknown key; leave it out: " in message(key)


@pytest.mark.parametrize("key", ["rl.zebra", "zzz", "rl.precedence", "engine.ports", "rl.lot", "sandbox.user"])
def test_a_far_fetched_hint_is_none(key):
    assert message(key).endswith(f"{key}: unknown key; docs/recipe-keys.md lists all keys")


@pytest.mark.parametrize(("key", "value", "words"), CASES["hints"])
def test_hints_of_values_and_typing_errors(key, value, words):
    assert words in message(key, value)


def test_numbers_of_the_command_line_are_decimal():
    pairs = ["a=010", "b=08", "c=0x10", "d=48:00:00", "e=1_000", "f=1e-4", "g='007'", "h=-012"]
    assert list(parse_overrides(pairs).values()) == [10, 8, 16, "48:00:00", 1000, 1e-4, "007", -12]


def test_a_section_without_keys_has_its_defaults():
    assert load_recipe("tiny_fast", {"evaluate": None}).evaluate.sets == {}
