"""Problem sets of environments: answers are optional, and problems may differ in their metadata only."""

import json

import pytest
from pydantic import ValidationError

from rstar_lab.common.errors import UserError
from rstar_lab.rl.environments.mixture import make_environments
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import Problems, RlSection
from rstar_lab.rl.resolved import check_answers, read_problems
from rstar_lab.rl.reward import functions


def jsonl(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_problems_of_an_environment_need_no_answer(tmp_path):
    path = jsonl(tmp_path / "p.jsonl", [{"question": "Win."}])
    assert read_problems(Problems(file=path, environment="game"))[0].answer == ""
    with pytest.raises(UserError, match="field 'answer': missing"):
        read_problems(Problems(file=path))


def test_training_and_evaluation_problems_may_differ_in_metadata_only(tmp_path):
    files = [jsonl(tmp_path / f"{n}.jsonl", [{"question": "Win.", "info": {"level": n}}]) for n in (1, 2)]
    held_out = read_problems(Problems(file=files[0], environment="game"))
    assert len(read_problems(Problems(file=files[1], environment="game"), held_out)) == 1
    with pytest.raises(UserError, match="is also in an evaluation set"):
        read_problems(Problems(file=files[0], environment="game"), held_out)


def test_a_built_in_reward_needs_an_answer():
    problem = Problem(problem_id="p", question="q", environment="sums")
    entry = {"name": "sums", "tools": ["python"]}
    with pytest.raises(
        UserError, match=r"problem p has no answer, which the reward of rl\.environments\.sums requires"
    ):
        check_answers([problem], RlSection(environments=[entry]))
    check_answers([problem], RlSection(environments=[entry | {"reward": "my:own"}]))


def test_an_unknown_reward_of_an_entry_is_an_error():
    with pytest.raises(ValidationError, match="'other' is not one of verify, released, tests or a module:function"):
        RlSection(environments=[{"name": "sums", "reward": "other"}])


def test_the_reward_released_is_computed_with_the_grader_of_verl(monkeypatch):
    monkeypatch.setattr(functions, "released_grade", lambda text, answer: text.endswith(answer))
    rl = RlSection(environments=[{"name": "sums", "reward": "released"}])
    reward = make_environments(rl, {}, lambda names: {})["sums"].reward
    assert [reward("so 12", "12"), reward("so 12", "3")] == [1.0, 0.0]
