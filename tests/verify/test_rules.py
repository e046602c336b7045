"""The rules of docs/evaluation.md: which answers are equal. Each row is tested with answers of several forms."""

import time

import pytest
from helpers.cases import read_cases

from rstar_lab.verify import same_answer, verify

CASES = read_cases(__file__)
RULES = CASES["rules"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("verdict", ["equal", "different"])
def test_pairs_of_answers(rule, verdict):
    assert [pair for pair in RULES[rule][verdict] if same_answer(*pair) is not (verdict == "equal")] == []


@pytest.mark.parametrize(("text", "answer_format", "answer", "equal"), CASES["where the answer is read"])
def test_where_the_answer_is_read(text, answer_format, answer, equal):
    assert verify(text, answer, answer_format=answer_format) is equal


@pytest.mark.parametrize("text", (
    "\\text{ m }$" * 18, "\\text{m m m }" * 15, "5 " + "m " * 99, "5 " + "square " * 28, "½" * 200, "(" * 200,
    "5\\text{" + "m " * 90, "m " * 40 + "(" + "m " * 40 + ")", "\\begin{vmatrix}" * 13,
))  # fmt: skip
def test_hostile_text_does_not_slow_the_reading_of_answers(text):
    started = time.process_time()
    same_answer(text[:200], "5")
    assert time.process_time() - started < 0.3
