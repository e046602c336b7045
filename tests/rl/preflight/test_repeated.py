"""Preflight compares the questions of training and evaluation files."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.rl.preflight.context import NotNeeded, Skip, Warn
from rstar_lab.rl.preflight.recipe import repeated_problems
from rstar_lab.rl.problems import Problem, write_problems
from rstar_lab.rl.recipe import Recipe


def questions_file(path: Path, questions: list[str]) -> dict[str, str]:
    write_problems(
        path, [Problem(problem_id=f"{path.stem}{i}", question=q, answer="1") for i, q in enumerate(questions)]
    )
    return {"file": str(path)}


@pytest.fixture
def check(tmp_path):
    def run(training: list[str], held_out: list[str], **section: object) -> str:
        stage = {"name": "one", "problems": questions_file(tmp_path / "train.jsonl", training) | section, "steps": 1}
        sets = {"exam": questions_file(tmp_path / "exam.jsonl", held_out)}
        recipe = Recipe.model_validate({"model": "tiny", "stages": [stage], "evaluate": {"sets": sets}})
        return repeated_problems(SimpleNamespace(recipe=recipe))

    return run


DIFFERENT = [f"What is {i} + {i}?" for i in range(100)]


def test_a_question_of_an_evaluation_file_fails_despite_its_layout(check):
    with pytest.raises(UserError, match=r"stages\.one\.problems: 1 of 100 .* train5 in evaluate\.sets\.exam"):
        check(DIFFERENT, ["what is  5 + 5 ?"])


def test_more_than_one_percent_of_repeated_questions_warns(check):
    assert check([*DIFFERENT, DIFFERENT[0]], ["What is 7 - 3?"])
    with pytest.raises(Warn, match="3 of 103 questions repeat an earlier one"):
        check(DIFFERENT + DIFFERENT[:3], ["What is 7 - 3?"])


@pytest.mark.parametrize(
    ("training", "held_out", "section", "found"),
    [
        (DIFFERENT, "What is 7 - 3?", {}, "100 training questions"),
        (
            DIFFERENT,
            "What is 5 + 5?",
            {"limit": 5},
            "5 training questions",
        ),  # questions beyond the limit are not compared
        (["?", "??"], "???", {}, "2 training questions"),  # questions without words are compared as text
    ],
)
def test_different_questions_pass(check, training, held_out, section, found):
    assert check(training, [held_out], **section).startswith(found)


def test_problems_of_an_environment_and_synthetic_ones_need_no_check(check):
    with pytest.raises(NotNeeded):
        check(["Play."] * 50, ["Play."], environment="game")
    stage = {"name": "one", "problems": {"synthetic": {"count": 3}}, "steps": 1}
    with pytest.raises(NotNeeded):
        repeated_problems(SimpleNamespace(recipe=Recipe.model_validate({"model": "tiny", "stages": [stage]})))


def test_missing_files_are_not_files_that_are_not_needed(tmp_path):
    stage = {"name": "s", "steps": 1, "problems": {"file": str(tmp_path / "missing.jsonl")}}
    context = SimpleNamespace(recipe=Recipe.model_validate({"name": "r", "model": "tiny", "stages": [stage]}))
    with pytest.raises(Skip, match=r"the files of problems are missing: .*missing\.jsonl"):
        repeated_problems(context)
