"""Pairs of answers that are drawn with their verdict: two notations of a value, or a value and a near miss."""

import collections

import pytest
from helpers.answer_pairs import KINDS, pairs

from rstar_lab.verify import same_answer


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
