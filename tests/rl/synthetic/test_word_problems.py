"""Word problems: distinct texts, a split by template, and answers that agree with an evaluation of the text."""

import re
from fractions import Fraction

import pytest

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.synthetic.families import programs, synthesize
from rstar_lab.rl.synthetic.traces import TraceMix, make_traces
from rstar_lab.rl.synthetic.word_problems import HELD_OUT, HELD_OUT_SETTINGS, SETTINGS, TRAINING, is_held_out
from rstar_lab.sandbox import Call, LocalSandbox


@pytest.fixture(scope="module")
def problems() -> dict[str, list[Problem]]:
    return {family: synthesize(0, 2000, families=[family]) for family in (TRAINING, HELD_OUT)}


def value_of_text(problem: Problem) -> Fraction:
    """Evaluate the sentences of a problem with its numbers in order, in rational numbers."""
    name, _, places = problem.info["template"].partition("/")
    first, *middle, last = map(int, places.split("-"))
    setting = SETTINGS[name]
    numbers = [Fraction(number) for number in re.findall(r"\d+", problem.question)]
    x = numbers.pop(0)
    if operation := setting.openings[first].operation:
        x = x * numbers.pop(0) if operation == "*" else x + numbers.pop(0)
    for sentence in (*(setting.steps[place] for place in middle), setting.questions[last]):
        if not sentence.operation:
            continue
        n = numbers.pop(0)
        x = {
            "more": x + n, "less": x - n, "times": x * n, "split": x / n, "share": x * (100 - n) / 100,
            "missing": n - x, "both": x * (n + 1),
        }[sentence.operation]  # fmt: skip
        assert x > 0 and x.denominator == 1  # no halves of apples, at any point of the story
    assert not numbers
    return x


def test_answers_are_those_of_the_text(problems):
    for problem in (*problems[TRAINING], *problems[HELD_OUT]):
        assert value_of_text(problem) == int(problem.answer), problem.question
        assert "{" not in problem.question


def test_texts_are_distinct_and_many(problems):
    for group in problems.values():
        assert len({problem.question for problem in group}) == len(group)
    # Pairs that share a text in 5,000 draws show how many texts there are (birthday paradox): more than 200,000.
    drawn = {p.question for seed in range(5) for p in synthesize(seed, 1000, families=[TRAINING], levels=[1])}
    assert len(drawn) > 5_000 - 5_000**2 / (2 * 200_000)


def test_training_and_held_out_share_no_template(problems):
    templates = {family: {p.info["template"] for p in group} for family, group in problems.items()}
    assert not templates[TRAINING] & templates[HELD_OUT]
    assert all(map(is_held_out, templates[HELD_OUT])) and len(templates[TRAINING]) > 800
    assert not {template.partition("/")[0] for template in templates[TRAINING]} & set(HELD_OUT_SETTINGS)


def test_levels_have_two_to_four_operations(problems):
    for problem in problems[TRAINING]:
        operations = sum(line.startswith("x = ") for line in programs(problem).good.splitlines())
        operations -= not re.match(r"x = \d+ [*+]", programs(problem).good)
        assert operations == min(problem.difficulty + 1, 4)


async def test_programs_print_the_answer_and_wrong_ones_do_not(problems):
    chosen = problems[HELD_OUT][:60]
    async with LocalSandbox() as sandbox:
        good = await sandbox.run_many([Call(programs(problem).good) for problem in chosen])
        wrong = await sandbox.run_many([Call(code) for problem in chosen for code in programs(problem).wrong])
        mix = TraceMix(
            clean=1, error_then_fix=1, wrong_code=1, guess=0, error_then_guess=0, malformed_then_fix=0, hardness=0
        )
        traces = await make_traces(chosen, sandbox, seed=0, mix=mix)
    assert [result.stdout.strip() for result in good] == [problem.answer for problem in chosen]
    assert all(result.outcome is Outcome.OK for result in wrong)
    same = sum(result.stdout.strip() == chosen[i // 2].answer for i, result in enumerate(wrong))
    assert same <= 4
    kinds = {
        kind: [trace for trace in traces if trace.kind == kind] for kind in ("clean", "error_then_fix", "wrong_code")
    }
    assert all(kinds.values()) and all(trace.correct for trace in kinds["clean"] + kinds["error_then_fix"])
    assert sum(trace.correct for trace in kinds["wrong_code"]) <= 2
