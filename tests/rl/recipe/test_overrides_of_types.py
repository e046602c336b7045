"""`--set` of the key that selects the type of a section keeps only the keys that the new type has."""

import pytest

from rstar_lab.rl.overrides import load_recipe, parse_overrides
from rstar_lab.rl.recipe import RecipeError


def load(*pairs: str):
    return load_recipe("tiny_fast", parse_overrides(list(pairs))).rl


def test_another_type_drops_the_keys_of_the_old_one():
    rl = load(
        "rl.schedule.type=async", "rl.old_log_probs=trainer", "rl.correction.type=tis", "rl.schedule.max_staleness=2"
    )
    assert (rl.schedule.type, rl.schedule.max_staleness, rl.correction.type) == ("async", 2, "tis")


def test_keys_that_both_types_have_are_kept():
    assert load().method.roc.oversample == load("rl.method.type=maxrl").method.roc.oversample == 2
    assert load("rl.schedule.type=sync").schedule.lockstep


def test_a_key_of_another_type_is_an_error():
    with pytest.raises(RecipeError, match=r"schedule.lockstep: not a key of type: async; it belongs to sync"):
        load(
            "rl.schedule.type=async", "rl.schedule.lockstep=true", "rl.old_log_probs=trainer", "rl.correction.type=tis"
        )
