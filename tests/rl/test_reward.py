"""The reward that a recipe names, and the answer that a rollout stores with it."""

import pytest
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_training import recipe_of

from rstar_lab.common.progress import Reporter
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import RecipeError
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.session import RunSession


@pytest.mark.parametrize(
    ("answer_format", "stored", "reward"), [("tagged", None, 0.0), ("boxed", "42", 1.0), ("last_number", "3", 0.0)]
)
async def test_rl_answer_decides_the_reward_and_the_stored_answer(answer_format, stored, reward):
    session = RunSession(resolve(recipe_of([], answer=answer_format)), Reporter())
    tokenizer = train_tokenizer(["text"], 300)
    context = RolloutContext.for_training(Codec(tokenizer, {}), {}, session.reward, session.recipe.rl)
    task = RolloutTask(Problem(problem_id="p", question="6 * 7?", answer="42"), "t", "g", sample=0, seed=1)
    engine = ScriptedEngine(tokenizer, lambda prompt, turn: r"so \boxed{42}, in 3 steps")
    trajectory = await run_rollout(task, engine, context)
    assert (trajectory.answer, trajectory.reward) == (stored, reward)


def test_rl_answer_is_checked_and_the_same_for_all_stages():
    with pytest.raises(RecipeError, match=r"rl.answer"):
        recipe_of([], answer="boxd")
    with pytest.raises(RecipeError, match=r"stages.a.answer"):
        recipe_of([{"name": "a", "steps": 1, "answer": "boxed"}])
