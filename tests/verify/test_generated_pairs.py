"""Pairs of answers that are drawn with their verdict: two notations of a value, or a value and a near miss."""

import collections

import pytest
from helpers.answer_pairs import KINDS, expression, pairs, write

from rstar_lab.verify import same_answer, warm_up


@pytest.fixture(scope="module", autouse=True)
def warm():
    warm_up()


@pytest.mark.parametrize(("seed", "count"), [(1, 2_000), pytest.param(2, 20_000, marks=pytest.mark.slow)])
def test_pairs_get_the_verdict_with_which_they_were_drawn(seed, count):
    accepted, rejected = [], []
    for kind, (candidate, answer, equal) in pairs(seed, count):
        if same_answer(candidate, answer) != equal:
            (rejected if equal else accepted).append((kind, candidate, answer))
    assert accepted == []
    assert len(rejected) <= count * 0.005, rejected[:20]


def test_every_kind_draws_equal_and_different_pairs():
    found = collections.Counter((kind, pair[2]) for kind, pair in pairs(3, 64 * len(KINDS)))
    for draw in KINDS:
        assert found[draw.__name__, False] > 5 and (found[draw.__name__, True] > 5 or draw.__name__ == "scales")


def test_arithmetic_has_the_value_with_which_it_was_drawn():
    import random

    rng = random.Random(5)
    wrong = []
    for _ in range(1_000):
        text, value = expression(rng)
        if not same_answer(text, write(value, rng)) or same_answer(text, write(value + rng.choice((1, -2, 7)), rng)):
            wrong.append((text, value))
    assert wrong == []
