"""The families: right answers, reproducible, disjoint, and not to be guessed."""

from collections import Counter

import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.synthetic.families import FAMILIES, LEVELS, programs, synthesize
from rstar_lab.sandbox import Call, LocalSandbox


def test_same_seed_same_problems_and_another_seed_others():
    assert synthesize(3, 200) == synthesize(3, 200)
    assert not {p.problem_id for p in synthesize(3, 200)} <= {p.problem_id for p in synthesize(4, 200)}


def test_families_and_levels_come_in_equal_shares():
    assert len(FAMILIES) >= 12
    counts = Counter((p.source, p.difficulty) for p in synthesize(0, 2 * len(FAMILIES) * len(LEVELS)))
    assert set(counts) == {(name, float(level)) for name in FAMILIES for level in LEVELS}
    # Two rounds; a repeated question is replaced by one of the next kind.
    assert max(counts.values()) <= 3


def test_levels_and_families_can_be_chosen():
    problems = synthesize(0, 40, levels=[2], families=["common_divisor", "squares_sum"])
    assert {(p.source, p.difficulty) for p in problems} == {("common_divisor", 2), ("squares_sum", 2)}


@pytest.mark.parametrize("choice", [{"levels": [7]}, {"families": ["riddles"]}])
def test_unknown_level_or_family_is_named(choice):
    with pytest.raises(UserError, match=r"7|riddles"):
        synthesize(0, 10, **choice)


def test_excluded_questions_do_not_come_up_again():
    held_out = synthesize(1, 400, levels=[1])
    problems = synthesize(2, 4000, levels=[1], exclude=held_out)
    assert not {p.question for p in problems} & {p.question for p in held_out}
    # It is the exclusion that keeps them apart: without it they overlap.
    assert {p.question for p in synthesize(2, 4000, levels=[1])} & {p.question for p in held_out}


def test_questions_and_ids_are_unique():
    problems = synthesize(0, 3000)
    assert len({p.question for p in problems}) == len({p.problem_id for p in problems}) == 3000


@pytest.mark.slow
def test_too_many_problems_for_the_numbers_there_are():
    with pytest.raises(UserError, match="different problems"):
        synthesize(0, 100_000, levels=[1], families=["divisor_sum"])


def test_the_most_common_answer_of_a_kind_is_a_bad_guess():
    by_kind: dict[tuple[str, float | None], Counter[str]] = {}
    for problem in synthesize(0, 100 * len(FAMILIES) * len(LEVELS)):
        by_kind.setdefault((problem.source, problem.difficulty), Counter())[problem.answer] += 1
    for kind, answers in by_kind.items():
        assert answers.most_common(1)[0][1] / answers.total() < 0.12, (kind, answers.most_common(3))


@pytest.mark.slow
async def test_correct_programs_print_the_answer_and_wrong_ones_do_not():
    problems = synthesize(11, 4 * len(FAMILIES) * len(LEVELS))
    async with LocalSandbox() as sandbox:
        good = await sandbox.run_many([Call(programs(p).good) for p in problems])
        wrong = await sandbox.run_many(
            [Call(programs(p).wrong[i % len(programs(p).wrong)]) for i, p in enumerate(problems)]
        )
    for problem, result in zip(problems, good, strict=True):
        assert (result.outcome, result.stdout.strip()) == (Outcome.OK, problem.answer), problem
    assert {result.outcome for result in wrong} == {Outcome.OK}
    lucky = sum(result.stdout.strip() == p.answer for p, result in zip(problems, wrong, strict=True))
    assert lucky / len(problems) < 0.06


def test_programs_of_a_foreign_problem():
    problem = synthesize(0, 1)[0]
    with pytest.raises(UserError, match=problem.problem_id):
        programs(problem.model_copy(update={"question": "How many roads must one walk down?"}))
    with pytest.raises(UserError, match="gsm8k"):
        programs(problem.model_copy(update={"source": "gsm8k"}))
