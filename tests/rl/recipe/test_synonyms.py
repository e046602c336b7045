"""Words of other trainers lead to our keys, values of the wrong kind to how they are written, and no hint is far-fetched."""

import pytest

from rstar_lab.rl.overrides import load_recipe, parse_overrides
from rstar_lab.rl.recipe import RecipeError
from rstar_lab.rl.recipe.explain import SYNONYMS, synonym_line
from rstar_lab.rl.recipe.keys import find_keys

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


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("rl.learning_rate", "rl.lr"), ("sft.learning_rate", "sft.lr"), ("learning_rate", "rl.lr or sft.lr"), ("lr", "rl.lr or sft.lr"),
        ("rl.lr_rate", "rl.lr"), ("stages.0.learning_rate", "rl.lr"), ("rl.num_generations", "rl.group_size"), ("rl.n", "rl.group_size"),
        ("evaluate.n", "evaluate.samples"), ("rl.batch_size", "rl.problems_per_step"), ("rl.kl", "rl.method.kl_coefficient"),
        ("rl.beta", "rl.method.kl_coefficient"), ("rl.max_steps", "stages.0.steps"), ("rl.steps", "stages.0.steps"),
        ("rl.max_tokens", "rl.limits.max_response_tokens"), ("rl.limits.max_new_tokens", "rl.limits.max_response_tokens"),
        ("sft.max_length", "sft.max_tokens"), ("rl.save_steps", "rl.checkpoint_every"), ("rl.eval_steps", "evaluate.during.every"),
        ("rl.rollouts", "rl.group_size"), ("rl.epsilon", "rl.method.clip_low or rl.method.clip_high"), ("rl.reward_funcs", "rl.reward"),
        ("epochs", "stages.0.steps or sft.epochs"), ("problems", "stages.0.problems.file or sft.conversations or evaluate.sets"),
        ("dataset", "stages.0.problems.file or sft.conversations or evaluate.sets"), ("sft.warmup_ratio", "sft.warmup"),
        ("sft.max_grad_norm", "sft.grad_clip"), ("sandbox.timeout", "sandbox.timeout_s"),
    ],
)  # fmt: skip
def test_a_word_of_another_trainer_names_our_key(key, ours):
    assert f"{key}: unknown key; here it is {ours}" in message(key) + "$" and f"{ours}$" in message(key) + "$"


@pytest.mark.parametrize("key", ["rl.entropy_coef", "rl.top_p", "rl.gradient_accumulation_steps"])
def test_a_word_without_a_counterpart_says_so(key):
    assert f"{key}: unknown key; leave it out: " in message(key)


@pytest.mark.parametrize(
    "key", ["rl.zebra", "zzz", "rl.precedence", "evaluate.temp", "engine.ports", "rl.lot", "sandbox.user"]
)
def test_a_far_fetched_hint_is_none(key):
    assert message(key).endswith(f"{key}: unknown key")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rl.clip_hihg", 1, "did you mean rl.method.clip_high?"), ("rl.group_sizes", 1, "did you mean group_size?"),
        ("rl.lora", 8, "give its keys, as in {rank: VALUE}"), ("name", 123, 'write it in quotes, as "123"'),
    ],
)  # fmt: skip
def test_hints_of_values_and_typing_errors(key, value, words):
    assert words in message(key, value)


def test_numbers_of_the_command_line_are_decimal():
    pairs = ["a=010", "b=08", "c=0x10", "d=48:00:00", "e=1_000", "f=1e-4", "g='007'", "h=-012"]
    assert list(parse_overrides(pairs).values()) == [10, 8, 16, "48:00:00", 1000, 1e-4, "007", -12]


def test_a_section_without_keys_has_its_defaults():
    assert load_recipe("tiny_fast", {"evaluate": None}).evaluate.sets == {}
