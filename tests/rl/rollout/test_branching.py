"""Branching of rollouts after tool responses: the trigger, what parent and child share, and a run."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from helpers.memorized_model import ANSWER, QUESTION
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_training import TOKENIZER, recipe_of
from helpers.slots import scheduled

from rstar_lab.common.progress import Reporter
from rstar_lab.rl import pipeline
from rstar_lab.rl.engine import Completion, Sampling
from rstar_lab.rl.methods.branching import FIRST_TOKENS, Branch, Branching, entropy_estimate, plan_branches
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import LimitsSection, RecipeError, RlSection
from rstar_lab.rl.renderers.paper import JUPYTER_TOOL, render_tool_call
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext
from rstar_lab.rl.rollout.plan import rollout_task
from rstar_lab.rl.rollout.run import run_rollouts
from rstar_lab.rl.scheduling.lengths import LengthPredictor
from rstar_lab.rl.scheduling.policies import make_policy
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.runs.reader import RunReader
from rstar_lab.sandbox import LocalSandbox

PROBLEM = Problem(problem_id="p", question="Count.", answer="7")
CELL = JUPYTER_TOOL["function"]["name"]
SURE, UNSURE = -0.1, -1.0  # log-probs


def tasks(count: int, group: int = 0):
    return [rollout_task(PROBLEM, run="r", seed=3, step=1, group=group, sample=i) for i in range(count)]


def test_the_trigger_is_the_rise_of_the_entropy_of_the_first_tokens():
    rng = np.random.default_rng(0)
    flat, peaked = rng.dirichlet([5.0] * 50), rng.dirichlet([0.05] * 50)
    exact = [-np.sum(p * np.log(p + 1e-300)) for p in (flat, peaked)]

    def sample(p, tokens):
        return np.log(p[rng.choice(50, size=tokens, p=p)])

    # The estimate is unbiased.
    for p, entropy in zip((flat, peaked), exact, strict=True):
        means = [entropy_estimate(list(sample(p, FIRST_TOKENS))) for _ in range(1500)]
        assert np.mean(means) == pytest.approx(entropy, abs=0.02)
    for _ in range(200):
        first, turn = sample(peaked, rng.integers(1, 60)), sample(flat, rng.integers(1, 60))
        threshold = rng.uniform(-1, 4)
        rise = np.mean(first[:20]) - np.mean(turn[:20])
        branch = Branch(*tasks(2), threshold)
        assert branch.should_start(list(first), list(turn)) == (rise > threshold)
    branch.decided.set()
    assert not branch.should_start([0.0], [-9.0])


@pytest.mark.parametrize("count, parents", [(1, 1), (2, 1), (5, 3), (8, 4)])
def test_half_of_a_group_has_parents_in_the_same_group(count, parents):
    both = tasks(count) + tasks(count, group=1)
    plan = plan_branches(both, 0.1)
    assert len(plan) == 2 * len(set(plan.values())) == 4 * (count - parents)
    for branch in plan.values():
        assert branch.parent.group_id == branch.child.group_id
        assert branch.child.sample == branch.parent.sample + parents < count


class Counter(ScriptedEngine):
    """Counts in a session. Seeds decide how sure the model is of its second and third turn, and what it adds there."""

    def __init__(self):
        super().__init__(TOKENIZER, lambda prompt, turn: "")

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        rng = random.Random(sampling.seed)
        turn = self.tokenizer.decode(prompt_ids).count("<|im_start|>assistant") - 1
        code = "x = 100\nx" if turn == 0 else f"x += {rng.randrange(1, 50)}\nx"
        text = (
            f"so</reason>\n{render_tool_call(CELL, {'code': code})}"
            if turn < 3
            else "so</reason><answer>\\boxed{7}</answer>"
        )
        self.script = lambda prompt, turn: text
        completion = await super().generate(prompt_ids, sampling)
        log_prob = UNSURE if turn in (1, 2) and rng.random() < 0.6 else SURE
        return Completion(
            completion.token_ids, [log_prob] * len(completion.token_ids), completion.finish_reason, "e", 5
        )


async def roll(branching: float | None, count: int = 12):
    async with LocalSandbox(workers=1) as sandbox:
        tools = make_tools(["jupyter"], sandbox, timeout_s=5.0, memory_mb=256)
        context = RolloutContext(
            Codec(TOKENIZER, tools), tools, lambda text, answer: 1.0, LimitsSection(max_response_tokens=4000)
        )
        policy = make_policy("adaptive", max_context=4000, predictor=LengthPredictor(4000))
        slots = scheduled({"e": Counter()}, policy)
        slot, planned = slots.slot, tasks(count)
        if branching is not None:
            slot = Branching(entropy=branching).wrap_slots(slot, planned, {})
        found = await run_rollouts(planned, context, slots=slot)
        assert not tools[CELL].sessions and not slots.scheduler.stats()["open"]
        return found


@pytest.mark.slow
async def test_a_branch_shares_the_prefix_and_the_session_of_its_parent():
    found = await roll(0.5)
    assert [t.sample for t in found] == list(range(12)) and len({t.traj_id for t in found}) == 12
    branched = [t for t in found if "branch_turn" in t.metrics]
    assert 2 < len(branched) < 6 and all(t.sample >= 6 for t in branched)
    for child in branched:
        parent, turn = found[int(child.metrics["branch_parent"])], int(child.metrics["branch_turn"])
        start = parent.turns[turn].start
        assert parent.sample == child.sample - 6 and turn in (1, 2)
        assert child.response_ids[:start] == parent.response_ids[:start]
        assert (
            child.loss_mask[:start] == parent.loss_mask[:start] and child.log_probs[:start] == parent.log_probs[:start]
        )
        assert child.turns[:turn] == parent.turns[:turn] and child.turns[turn].start == start
        assert child.turns[turn].text != parent.turns[turn].text
        assert parent.log_probs[start] == UNSURE and child.loss_mask[start]
    for t in found:  # every session has counted the additions of its own rollout
        values = [100]
        for turn in t.turns[1:3]:
            values.append(values[-1] + int(turn.text.split("+= ")[1].split("\\n")[0]))
        assert [int(call.response) for call in t.calls] == values
        assert t.turns[-1].versions == ((5, t.turns[-1].end - t.turns[-1].start),)

    again, plain = await roll(0.5), await roll(None)
    assert [(t.response_ids, t.metrics) for t in again] == [(t.response_ids, t.metrics) for t in found]
    # Rollouts that are not branches are those of a run without branching.
    assert all(t.response_ids == other.response_ids for t, other in zip(found, plain, strict=True) if t not in branched)
    assert all(not t.metrics for t in plain)


@pytest.mark.slow
async def test_a_rollout_whose_session_is_lost_does_not_branch(caplog):
    async def lost(self, session: str, n: int):
        raise ValueError(f"session: {session!r} is not live; run a cell in it first")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalSandbox, "fork", lost)
        found = await roll(0.5, 4)
    assert len(found) == 4 and not any(t.metrics for t in found)
    assert "branching: rollout r-000001-0000-0" in caplog.text and "is not live" in caplog.text


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"schedule": {"lockstep": True}}, "branching cannot be combined with schedule.lockstep"),
        ({"tools": ["mcp+stdio:server"]}, "branching cannot be combined with the tool mcp.stdio:server"),
        ({"environments": [{"name": "e", "environment": "m:E"}]}, "branching cannot be combined with environments.e.environment"),
    ],
)  # fmt: skip
def test_settings_without_branches_are_rejected(keys, message):
    with pytest.raises(ValueError, match=message):
        RlSection(method={"add": [{"type": "branching", "entropy": 0.1}]}, **keys)


def test_sessions_of_gvisor_are_rejected():
    recipe = recipe_of(
        [{"name": "s", "steps": 1}],
        schedule={"lockstep": False},
        tools=["jupyter"],
        method={"add": [{"type": "branching", "entropy": 0.1}]},
    )
    data = json.loads(recipe.model_dump_json()) | {"sandbox": {"isolation": "gvisor"}}
    with pytest.raises(
        RecipeError, match=r"stages.s.method.add: branching: sessions of sandbox.isolation: gvisor cannot be copied"
    ):
        parse_recipe(data)


@pytest.mark.soak
async def test_a_run_with_branches_is_trained_and_stored(memorized_model, tmp_path: Path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"problem_id": "p", "question": QUESTION, "answer": ANSWER}) + "\n")
    recipe = parse_recipe(
        {
            "name": "b", "model": str(memorized_model[0]), "runs": str(tmp_path), "sandbox": {"workers": 1},
            "rl": {
                "problems_per_step": 2, "group_size": 4, "limits": {"max_response_tokens": 300, "max_turns": 3}, "temperature": 1.3,
                "method": {"add": [{"type": "branching", "entropy": 0.0}]}, "token_arrays": "all", "lr": 1e-4, "warmup_steps": 0,
                "checkpoint_every": 10,
            },
            "stages": [{"name": "s", "problems": {"file": str(problems)}, "steps": 2}],
            "engine": {"kind": "transformers", "dtype": "float32", "mismatch_limit": 1e9},
        }
    )  # fmt: skip
    async with pipeline.RunSession.open(resolve(recipe), Reporter()) as session:
        await pipeline.train(session, memorized_model[0])
    reader = RunReader(tmp_path / "b-rl")
    rows = reader.read("trajectories").to_pylist()
    groups = {(row["step"], row["group_id"]): 0 for row in rows}
    for row in rows:
        groups[row["step"], row["group_id"]] += 1
    assert len(groups) == 4 and set(groups.values()) == {8}
    branched = [row for row in rows if "branch_turn" in dict(row["metrics"] or {})]
    by_id = {row["traj_id"]: row for row in rows}
    assert branched and sum(line.get("branches", 0) for line in reader.metrics()) == len(branched)
    for row in branched:
        parent = by_id[f"{row['traj_id'][:-2]}{int(dict(row['metrics'])['branch_parent']):02d}"]
        assert parent["group_id"] == row["group_id"] and parent["calls"] >= 1 and row["calls"] >= 1
    assert any(row["kept"] for row in branched)
    assert all(line["kept"] % 4 == 0 for line in reader.metrics())
