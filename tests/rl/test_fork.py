"""Tests of forks: continuations of stored rollouts of a tiny model that knows one conversation."""

import json
import time

import pytest
import torch
from helpers.memorized_model import ANSWER, QUESTION

from rstar_lab.analysis import inspect
from rstar_lab.common.errors import UserError
from rstar_lab.rl.engine import Completion, FinishReason, Sampling
from rstar_lab.rl.engines.hf import HfEngine
from rstar_lab.rl.fork import fork
from rstar_lab.rl.models.model import build_tiny, load_model, load_tokenizer, save_model
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.reward import make_reward
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.records import step_rows
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.runs import RunWriter
from rstar_lab.runs.reader import RunReader
from rstar_lab.sandbox import LocalSandbox

pytestmark = pytest.mark.slow

TRAJECTORY = "base-rl/1/0"


async def write_run(folder, engine, tokenizer, tools=("python",), limit=300):
    """Store one rollout of `engine` as step 1 of a run."""
    rl = {"tools": list(tools), "limits": {"max_response_tokens": limit, "max_turns": 4}, "temperature": 0.2}
    stages = [{"name": "rl", "steps": 1, "problems": {"synthetic": {"count": 1}}}]
    recipe = parse_recipe({"name": "base", "model": "tiny", "rl": rl, "stages": stages})
    async with LocalSandbox() as sandbox:
        made = make_tools(recipe.rl.tools, sandbox)
        context = RolloutContext.for_training(Codec(tokenizer, made), made, make_reward("verify"), recipe.rl)
        task = RolloutTask(Problem(problem_id="p", question=QUESTION, answer=ANSWER), TRAJECTORY, "g", 0, 1)
        rollout = await run_rollout(task, engine, context)
    with RunWriter.open(folder, "base-rl", kind="train", recipe=recipe.model_dump(mode="json"), seed=0) as writer:
        writer.write_step("rl", 1, **step_rows([rollout], {}, "all"), metrics={})
        writer.finish("finished")
    return rollout


@pytest.fixture
async def run(tmp_path, memorized_model):
    model = memorized_model[0]
    engine = HfEngine()
    await engine.start(model, {"dtype": "float32"})
    rollout = await write_run(tmp_path / "runs", engine, load_tokenizer(model))
    assert rollout.reward == 1 and len(rollout.turns) == 2 and len(rollout.calls) == 1
    return tmp_path / "runs" / "base-rl", model, rollout


async def test_sixteen_continuations_start_from_the_tokens_before_the_turn(run):
    folder, model, rollout = run
    view = inspect(folder.parent)
    started = time.monotonic()
    forked = view.fork(TRAJECTORY, turn=1, k=16, model=model)
    print(f"16 continuations: {time.monotonic() - started:.1f} s")
    assert forked.state == "stateless" and forked.weights == str(model)
    tree = forked.tree
    assert len(tree) == 16 and set(tree.turn) == {1} and set(tree.reward) == {1.0} and set(tree.calls) == {1}
    assert set(tree.correct) == {True}
    start = rollout.turns[1].start
    for row in RunReader(forked.run).read("transcripts").to_pylist():
        assert row["response_ids"][:start] == rollout.response_ids[:start]
        assert row["loss_mask"][:start] == rollout.loss_mask[:start]
    info = RunReader(forked.run).info
    assert info["kind"] == "fork" and info["parent"] == {"run": "base-rl", "step": 1}
    (value,) = forked.values.to_dict("records")
    assert value["value"] == 1 and value["n"] == 16 and value["low"] == pytest.approx(16 / (16 + 1.959964**2))
    assert len(open_again := inspect(folder.parent).rows()) == 17 and TRAJECTORY in set(open_again.traj_id)


async def test_an_edit_replaces_the_start_of_the_turn_and_every_turn_has_a_value(run):
    folder, model, rollout = run
    wrong = "It says 41.</reason>\n<answer>\\boxed{41}</answer>"
    forked = inspect(folder.parent).fork(TRAJECTORY, turn=1, k=3, edit=wrong, model=model)
    rows = RunReader(forked.run).read("transcripts").to_pylist()
    assert all(json.loads(row["messages"])[-1]["content"].startswith("It says 41.") for row in rows)
    start = rollout.turns[1].start
    assert not any(any(row["loss_mask"][start : start + 5]) for row in rows), "the edit is not the model's text"

    whole = inspect(folder.parent).fork(TRAJECTORY, k=4, model=model)
    assert list(whole.values.turn) == [0, 1] and list(whole.values.n) == [4, 4]
    assert whole.lost_at is None and len(whole.figure.data) == 1


async def test_wrong_input_is_named(run):
    folder, model, _ = run
    with pytest.raises(UserError, match="has the turns 0 to 1"):
        fork(folder, TRAJECTORY, 1, turn=2, model=model)
    with pytest.raises(UserError, match="has no checkpoint: give model=FOLDER"):
        fork(folder, TRAJECTORY, 1, turn=1)
    with pytest.raises(UserError, match="edit requires a turn"):
        fork(folder, TRAJECTORY, 1, edit="x", model=model)
    with pytest.raises(UserError, match="urls: 'host:8000' does not begin with http"):
        fork(folder, TRAJECTORY, 1, turn=1, model=model, url="host:8000")


async def test_a_model_with_another_tokenizer_is_rejected(run):
    folder, model, rollout = run
    tokenizer = load_tokenizer(model)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))], clean_up_tokenization_spaces=False)
    (folder / "tokens.json").write_text(json.dumps(texts))
    assert len(inspect(folder.parent).fork(TRAJECTORY, turn=1, k=1, model=model).tree) == 1
    token = rollout.response_ids[0]
    (folder / "tokens.json").write_text(json.dumps([*texts[:token], "other", *texts[token + 1 :]]))
    with pytest.raises(UserError, match=f"another tokenizer than run base-rl: token {token} is .*, not 'other'"):
        fork(folder, TRAJECTORY, 1, turn=1, model=model)


async def test_alternatives_are_the_most_likely_tokens_of_the_model(run):
    folder, model, rollout = run
    view = inspect(folder.parent)
    position = rollout.turns[0].start + 3
    table = view.alternatives(position, TRAJECTORY, k=5, model=model)
    network = load_model(model, torch.float32)
    with torch.no_grad():
        ids = torch.tensor([rollout.prompt_ids + rollout.response_ids[:position]])
        expected = network(ids).logits[0, -1].log_softmax(-1)
    assert list(table.token_id) == expected.topk(5).indices.tolist() and list(table["rank"]) == [1, 2, 3, 4, 5]
    assert list(table.log_prob) == pytest.approx(expected.topk(5).values.tolist(), abs=1e-5)
    assert list(table.stored) == [True] + 4 * [False], "the model knows this conversation by heart"
    assert table.attrs == {"weights": str(model)}

    other = model.parent / "other"
    save_model(
        other,
        build_tiny(load_tokenizer(model), seed=1, hidden_size=64, layers=1, heads=2, kv_heads=1),
        load_tokenizer(model),
    )
    unlikely = view.alternatives(position, TRAJECTORY, k=2, model=other)
    assert list(unlikely.stored) == [False, False, True] and unlikely["rank"].iloc[2] > 2
    size = len(rollout.response_ids)
    with pytest.raises(UserError, match=f"has the response tokens 0 to {size - 1}"):
        view.alternatives(size, TRAJECTORY, model=model)
    with pytest.raises(UserError, match="has no checkpoint: give model=FOLDER"):
        view.alternatives(0, TRAJECTORY)
    with pytest.raises(UserError, match="does not answer"):
        view.alternatives(0, TRAJECTORY, url="http://127.0.0.1:9")


class Scripted:
    """An engine that sends the given turns, one after the other."""

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns = tokenizer, iter(turns)

    async def generate(self, prompt_ids: list[int], sampling: Sampling):

        ids = [*self.tokenizer.encode(next(self.turns), add_special_tokens=False), sampling.stop_token_ids[0]]
        return Completion(ids, [-0.1] * len(ids), FinishReason.STOP, engine="scripted")


async def test_sessions_are_rebuilt_by_replaying_the_earlier_calls(tmp_path, memorized_model):
    tokenizer = load_tokenizer(memorized_model[0])
    random_model = build_tiny(tokenizer, seed=0, hidden_size=64, layers=2, heads=2, kv_heads=1, max_length=4096)
    save_model(tmp_path / "random", random_model, tokenizer)
    (name,) = make_tools(["jupyter"], object())  # type: ignore[arg-type]

    def call(code):
        return f"<tool_call>{json.dumps({'name': name, 'arguments': {'code': code}})}</tool_call>"

    turns = [call("x = 6"), call("print(x * 7)"), "<answer>\\boxed{42}</answer>"]
    rollout = await write_run(tmp_path / "runs", Scripted(tokenizer, turns), tokenizer, ["jupyter"], 500)
    assert [str(record.outcome) for record in rollout.calls] == ["ok", "ok"], rollout.calls
    made = fork(tmp_path / "runs" / "base-rl", TRAJECTORY, 1, turn=2, k=3, model=tmp_path / "random")
    assert (made.state, made.replayed, made.differing) == ("replay", 6, 0)
    rows = RunReader(made.run).read("transcripts").to_pylist()
    assert len({tuple(row["response_ids"]) for row in rows}) == 3, "each continuation has its own seed"
