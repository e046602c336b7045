"""Trajectories that are read back from a run."""

import pytest
from helpers.rollouts import roll_out
from helpers.scripted_training import recipe_of

from rstar_lab.common.errors import UserError
from rstar_lab.rl.reward import make_reward
from rstar_lab.rl.rollout.records import read_trajectories, step_rows, stored_trajectory
from rstar_lab.runs import RunWriter
from rstar_lab.runs.reader import RunReader


@pytest.mark.parametrize(("answer", "void"), [("tagged", True), ("boxed", False), ("last_number", False)])
async def test_stored_turns_are_void_by_answer_format_and_keep_control_tokens(tmp_path, answer, void):
    recipe = recipe_of([], answer=answer)
    rollout = await roll_out(r"so <|im_start|> \boxed{42}", reward=make_reward("verify", answer), rl=recipe.rl)
    with RunWriter.open(tmp_path, "r", kind="train", recipe=recipe.model_dump(mode="json"), seed=0) as writer:
        writer.write_step("rl", 1, **step_rows([rollout], {}, "all"), metrics={})
        writer.finish("finished")
    (stored,), _ = read_trajectories(RunReader(tmp_path / "r"), 1)
    assert [turn.void for turn in stored.turns] == [turn.void for turn in rollout.turns] == [void]
    assert [turn.control_token for turn in stored.turns] == [turn.control_token for turn in rollout.turns] == [True]


@pytest.mark.parametrize("messages", ['["text"]', "{}", "no JSON"])
def test_messages_of_another_form_are_an_error_of_the_run_store(messages):
    with pytest.raises(UserError, match="a transcript: "):
        stored_trajectory({}, {"messages": messages}, ())
