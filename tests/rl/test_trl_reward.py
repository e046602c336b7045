"""Reward functions in TRL's form as `rl.reward`: the example of the docs, columns, errors, a rollout, and TRL's own functions."""

import re
import sys
from pathlib import Path

import pytest
from helpers.rollouts import roll_out
from helpers.scripted_training import recipe_of

from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import Reporter
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.reward import RewardInputs, UserReward, make_reward
from rstar_lab.rl.session import RunSession

PAGE = Path(__file__).parents[2] / "docs" / "own-tools.md"
PROBLEM = Problem(problem_id="p", question="6 * 7?", answer="42", info={"bonus": 2, "source": "mine"})
MODULE = """
def messages(prompts, completions, bonus, source, solution):
    assert prompts == [[{"role": "user", "content": "6 * 7?"}]] and solution == ["42"] and source == ["mine"]
    return [bonus[0] * (completions[0][0]["role"] == "assistant")]

def texts(prompts, completions: list[str], **columns):
    assert prompts == ["6 * 7?"] and columns["problem_id"] == ["p"]
    return [len(c) for c in completions]

def not_applicable(completions, **columns):
    return [None]

def two(completions, **columns):
    return [1.0, 2.0]

def infinite(completions, **columns):
    return [float("inf")]

def missing(completions, weather):
    return [1.0]

def needs_ids(completions, completion_ids):
    return [1.0]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str), "bonus": extra_info["bonus"]}

def three(text, answer, weather):
    return 1.0

async def later(completions, **columns):
    return [1.0]
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    example = PAGE.read_text().split("### Reward functions of TRL")[1]
    (code,) = re.findall(r"```python\n(.*?)```", example.split("\n### ")[0], re.DOTALL)
    (tmp_path / "trl_style.py").write_text(code + MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "trl_style", raising=False)


def score(name: str, text: str = "it is 42") -> float:
    reward = make_reward(name)
    assert isinstance(reward, UserReward)
    return reward.score(text, PROBLEM.answer, RewardInputs(PROBLEM))[0]


@pytest.mark.parametrize(("text", "expected"), [("it is 42", 1.0), ("43", 0.5), ("50", 0.0), ("none", 0.0)])
async def test_the_example_of_the_docs_rewards_a_rollout_of_a_recipe(text, expected):
    session = RunSession(resolve(recipe_of([], reward="trl_style:near")), Reporter())
    trajectory = await roll_out(text, reward=session.reward, rl=session.recipe.rl, problem=PROBLEM)
    assert trajectory.reward == expected


def test_functions_receive_columns_as_messages_or_texts():
    assert score("trl_style:messages") == 2.0
    assert score("trl_style:texts") == len("it is 42")
    assert score("trl_style:not_applicable") == 0.0


def test_unsupported_functions_are_errors_at_start_up():
    with pytest.raises(UserError, match="needs_ids: parameter completion_ids is supplied by TRL's trainer only"):
        make_reward("trl_style:needs_ids")
    with pytest.raises(UserError, match="later: async reward functions are not supported"):
        make_reward("trl_style:later")


@pytest.mark.parametrize(
    ("name", "message"),
    [("two", "returned 2 rewards"), ("infinite", "expected finite numbers"), ("missing", "argument: 'weather'")],
)
def test_failures_name_the_function(name, message):
    with pytest.raises(UserError, match=f"rl.reward: trl_style:{name} .*{message}"):
        score(f"trl_style:{name}")


def test_reward_functions_of_trl():
    pytest.importorskip("trl.rewards", reason="requires trl (pip install trl)")
    assert score("trl.rewards:accuracy_reward", r"It is \boxed{42}") == 1.0
    assert score("trl.rewards:accuracy_reward", r"It is \boxed{41}") == 0.0
    assert score("trl.rewards:think_format_reward", "<think>\na\n</think>\n42") == 1.0


@pytest.mark.parametrize("name", ["ground_truth", "target", "label", "gold", "answers", "gt", "solution"])
def test_the_true_answer_has_the_names_that_trl_documents(name, tmp_path):
    Path("named_answer.py").write_text(f"def r(completions, {name}, **kwargs):\n    return [float({name} == ['42'])]\n")
    sys.modules.pop("named_answer", None)
    assert score("named_answer:r") == 1.0


def test_a_parameter_that_nothing_supplies_is_an_error_at_load():
    with pytest.raises(UserError, match="nothing supplies the parameter weather"):
        make_reward("trl_style:missing", info=set())
    with pytest.raises(UserError, match="nothing supplies the parameter weather"):
        make_reward("trl_style:three")
    assert make_reward("trl_style:messages", info={"bonus"})
    assert score("trl_style:compute_score") == 1.0
