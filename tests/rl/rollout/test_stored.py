"""Trajectories that are read back from a run."""

import pytest
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_training import recipe_of

from rstar_lab.common.errors import UserError
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.reward import make_reward
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.records import read_trajectories, step_rows, stored_trajectory
from rstar_lab.runs import RunWriter
from rstar_lab.runs.reader import RunReader


@pytest.mark.parametrize(("answer", "void"), [("tagged", True), ("boxed", False), ("last_number", False)])
async def test_stored_turns_are_void_by_answer_format_and_keep_control_tokens(tmp_path, answer, void):
    recipe = recipe_of([], answer=answer)
    tokenizer = train_tokenizer(["text"], 300)
    engine = ScriptedEngine(tokenizer, lambda prompt, turn: r"so <|im_start|> \boxed{42}")
    context = RolloutContext.for_training(Codec(tokenizer, {}), {}, make_reward("verify", answer), recipe.rl)
    task = RolloutTask(Problem(problem_id="p", question="6 * 7?", answer="42"), "t", "g", sample=0, seed=1)
    rollout = await run_rollout(task, engine, context)
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
