"""Tests of RoC resampling: counts, exact distribution, and the rule of the public release."""

import itertools
import math

import numpy as np
import pytest
from helpers.cases import read_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rstar_lab.rl.algorithm import roc
from rstar_lab.rl.renderers.base import count_answers

CASES = read_cases(__file__)
groups = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.5])), max_size=40)


def unzip(group):
    return [reward for reward, _ in group], [penalty for _, penalty in group]


@settings(max_examples=400, deadline=None)
@given(
    groups, st.integers(0, 20), st.sampled_from(["paper", "released", "random"]), st.integers(0, 3), st.integers(0, 3)
)
def test_kept_counts_are_proportional(group, keep, rule, min_positive, min_negative):
    rewards, penalties = unzip(group)
    if min_positive + min_negative > keep:
        with pytest.raises(ValueError, match="min_positive"):
            roc.resample(rewards, penalties, keep, rule=rule, min_positive=min_positive, min_negative=min_negative)
        return
    kept = roc.resample(rewards, penalties, keep, rule=rule, min_positive=min_positive, min_negative=min_negative)
    assert kept == sorted(set(kept)) and all(type(index) is int and 0 <= index < len(group) for index in kept)
    assert len(kept) == min(keep, len(group))
    positives = sum(rewards[index] > 0 for index in kept)
    negatives = len(kept) - positives
    all_positives = sum(reward > 0 for reward in rewards)
    all_negatives = len(rewards) - all_positives
    if rule == "random":
        return
    assert positives >= min(min_positive, all_positives) and negatives >= min(min_negative, all_negatives)
    if rule == "paper" and len(kept) > max(1, min_positive, min_negative):
        assert bool(positives) == bool(all_positives) and bool(negatives) == bool(all_negatives)
    if len(group) > keep and not min_positive and not min_negative:
        assert abs(positives - keep * all_positives / len(group)) <= 1, "each side keeps its proportional share"


@pytest.mark.parametrize("keep", [2, 16])
@pytest.mark.parametrize("positives", range(33))
def test_halves_are_rounded_to_even(positives, keep):
    rewards = [1.0] * positives + [0.0] * (32 - positives)
    kept = roc.resample(rewards, [0.1] * 32, keep)
    share = sum(rewards[index] > 0 for index in kept)
    assert share == min(max(round(positives * keep / 32), min(1, positives)), keep - min(1, 32 - positives))


def test_randomness_comes_only_from_rng():
    group = ([1, 0] * 16, np.linspace(0, 1, 32))
    first = [roc.resample(*group, 16, rng=np.random.default_rng(s)) for s in (1, 1, 2)]
    assert first[0] == first[1] != first[2]
    assert len({tuple(roc.resample(*group, 16)) for _ in range(20)}) > 1, "fresh randomness without a generator"
    assert len({tuple(roc.resample(*group, 16, rule="released")) for _ in range(20)}) == 1


def successive(weights, k):
    """Return the exact probability of each set of k items drawn successively without replacement."""
    sets: dict[frozenset, float] = {}
    for order in itertools.permutations(range(len(weights)), k):
        p, left = 1.0, sum(weights)
        for index in order:
            p *= weights[index] / left
            left -= weights[index]
        sets[frozenset(order)] = sets.get(frozenset(order), 0.0) + p
    return sets


def chi_square(counts, probabilities, draws):
    keys = list(probabilities)
    return stats.chisquare([counts.get(key, 0) for key in keys], [probabilities[key] * draws for key in keys]).pvalue


@pytest.mark.parametrize("penalties", [[0.1, 0.2, 0.4, 0.8, 1.5, 2.0], [0.0, 0.0, 0.05, 0.5, 0.5, 1.0]])
def test_positives_follow_the_exact_distribution(penalties):
    """3 of 6 positives: the frequency of each set follows weights 1 / max(penalty, floor)."""
    rng, draws = np.random.default_rng(0), 20_000
    rewards, all_penalties = [1.0] * 6 + [0.0] * 6, [*penalties, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0]
    positive_sets: dict[frozenset, int] = {}
    negative_sets: dict[frozenset, int] = {}
    for _ in range(draws):
        kept = roc.resample(rewards, all_penalties, 6, rng=rng)
        for sets, side in ((positive_sets, range(6)), (negative_sets, range(6, 12))):
            key = frozenset(kept) & frozenset(side)
            sets[key] = sets.get(key, 0) + 1
    exact = successive([1 / max(penalty, roc.PENALTY_FLOOR) for penalty in penalties], 3)
    # Sets too rare for the chi-square approximation are merged into one class.
    rare = {key for key, p in exact.items() if p * draws < 10}
    merged = {key: p for key, p in exact.items() if key not in rare}
    merged[frozenset()] = sum(exact[key] for key in rare) + 1e-12
    positive_sets[frozenset()] = sum(positive_sets.pop(key, 0) for key in rare)
    if not rare:
        merged.pop(frozenset())
        positive_sets.pop(frozenset())
    assert chi_square(positive_sets, merged, draws) > 1e-3
    uniform = {frozenset(chosen): 1 / math.comb(6, 3) for chosen in itertools.combinations(range(6, 12), 3)}
    assert chi_square(negative_sets, uniform, draws) > 1e-3, "negatives are uniform, whatever their penalty"


@pytest.mark.parametrize(("rewards", "penalties", "keep", "minima", "kept"), CASES["released rule"])
def test_released_rule_keeps_the_expected_rollouts(rewards, penalties, keep, minima, kept):
    found = roc.resample(rewards, penalties, keep, rule="released", min_positive=minima[0], min_negative=minima[1])
    assert found == kept


def test_random_rule_ignores_rewards_and_penalties():
    rng = np.random.default_rng(3)
    counts = np.zeros(8)
    for _ in range(4000):
        counts[roc.resample([1, 1, 0, 0, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0, 0, 9], 4, rule="random", rng=rng)] += 1
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1, 0], [0.1], 1), "equal length"),
        (([1, 0], [0.1, -0.1], 1), "at least 0"),
        (([1, 0], [0.1, math.nan], 1), "finite"),
        (([math.nan, 0], [0.1, 0.1], 1), "finite"),
        (([1, 0], [0.1, 0.1], -1), "keep"),
    ],
)
def test_invalid_arguments_are_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        roc.resample(*arguments)
    with pytest.raises(ValueError, match="rule"):
        roc.resample([1, 0], [0, 0], 1, rule="best")  # type: ignore[arg-type]


def test_penalties_equal_their_definition():
    assert [roc.tool_error_penalty(*pair) for pair in [(0, 0), (0, 4), (1, 4), (4, 4)]] == [0.5, 0.0, 0.25, 1.0]
    for bad in [(1, 0), (-1, 2), (3, 2)]:
        with pytest.raises(ValueError, match="errors"):
            roc.tool_error_penalty(*bad)
    assert [roc.format_penalty(*pair) for pair in [(0, 3), (1, 3), (2, 4), (3, 4), (9, 2), (1, 0), (0, 0)]] == [
        1.0, 0.0, 0.25, 0.5, 1.0, 1.0, 1.0,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="negative"):
        roc.format_penalty(-1, 2)
    assert roc.released_tool_error_penalty([]) == 0.5
    assert roc.released_tool_error_penalty(["no Errors today", "4", "TimeoutExpired", "3"]) == 0.25


def test_answer_tags_are_counted():
    assert count_answers("none") == 0
    assert count_answers("<answer>1</answer> and <answer>2</answer>") == 2
    for stray in CASES["stray tags"]:
        assert count_answers(stray) == 0
