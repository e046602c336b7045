"""Tests of counting reflection words: complete words only, longest phrase first."""

import pytest

from rstar_lab.runs.reflection_words import count_reflection_words


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("Let me double-check: the checked total matches.", 2),  # not "check" inside "double-check" or "checked"
        ("WAIT, that is a mistake", 2),
        ("try\n again", 1),
        ("recheck unchecked checks waiter", 0),
    ],
)
def test_complete_words_and_phrases_are_counted(text, count):
    assert count_reflection_words(text) == count


def test_other_word_lists_can_be_counted():
    assert count_reflection_words("zonk, zonk (a.b) a-b", ["zonk", "(a.b)"]) == 3
    assert count_reflection_words("anything", []) == 0
