"""The reward that a recipe names, and the answer that a rollout stores with it."""

from types import SimpleNamespace

import pytest
from helpers.rollouts import roll_out
from helpers.scripted_training import recipe_of, right

from rstar_lab.common.progress import Reporter
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.reward import boxed
from rstar_lab.rl.session import RunSession
from rstar_lab.sandbox.limits import MAX_TIMEOUT_S


@pytest.mark.parametrize(
    ("answer_format", "stored", "reward"), [("tagged", None, 0.0), ("boxed", "42", 1.0), ("last_number", "3", 0.0)]
)
async def test_rl_answer_decides_the_reward_and_the_stored_answer(answer_format, stored, reward):
    session = RunSession(resolve(recipe_of([], answer=answer_format)), Reporter())
    trajectory = await roll_out(r"so \boxed{42}, in 3 steps", reward=session.reward, rl=session.recipe.rl)
    assert (trajectory.answer, trajectory.reward) == (stored, reward)


@pytest.mark.parametrize("limit", [0.2, MAX_TIMEOUT_S, 1e6])
def test_the_time_limit_of_a_boxed_reward_is_the_keys_up_to_the_sandboxs(monkeypatch, limit):
    box = SimpleNamespace(
        number=lambda program, arguments, timeout_s: SimpleNamespace(number=timeout_s, failed_at_start=False)
    )
    monkeypatch.setattr(boxed, "grader_box", lambda: box)
    assert boxed.boxed_function("right", right, limit)("text", "answer") == min(limit, MAX_TIMEOUT_S)
