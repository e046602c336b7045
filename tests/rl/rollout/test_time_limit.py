"""Tests of the time limit of a rollout, and of the mismatch of tokens of several policy versions."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_training import TOKENIZER, problem, right
from helpers.slots import scheduled

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.engine import Completion, FinishReason, Sampling
from rstar_lab.rl.recipe import LimitsSection
from rstar_lab.rl.renderers.paper import END_OF_TURN, render_tool_call
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.run import run_rollouts
from rstar_lab.rl.scheduling.lengths import LengthPredictor
from rstar_lab.rl.scheduling.policies import POLICIES, make_policy
from rstar_lab.rl.scheduling.slots import Lockstep
from rstar_lab.rl.step import MismatchError, check_mismatch_limit, engine_mismatch
from rstar_lab.rl.tools.base import Tool, ToolResult
from rstar_lab.rl.trajectory import StopReason

CALL = "think</reason>\n" + render_tool_call("wait", {})
ANSWER = " so it is</reason><answer>\\boxed{7}</answer>"


class TokenByTokenEngine:
    """An engine that returns a script token by token. ticks: tokens after which it waits for ever."""

    kv_tokens, name = 10**6, "typist"

    def __init__(self, turns: list[str], ticks: int = 10**9):
        self.turns = [TOKENIZER.encode(text + END_OF_TURN, add_special_tokens=False) for text in turns]
        self.ticks, self.open, self.cancelled = ticks, 0, 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        turn = self.turns[str(TOKENIZER.decode(prompt_ids)).count("<|im_start|>assistant") - 1]
        self.open += 1
        try:
            for _ in turn:
                if not self.ticks:
                    await asyncio.Event().wait()
                self.ticks -= 1
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1
        return Completion(turn, [-0.5] * len(turn), FinishReason.STOP, self.name)


class Wait:
    """A tool that waits. Records which trajectories were closed."""

    schema = {  # noqa: RUF012
        "type": "function",
        "function": {"name": "wait", "description": "", "parameters": {"type": "object", "properties": {}}},
    }

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def __call__(self, arguments, *, seed: int, traj_id: str) -> ToolResult:
        await asyncio.sleep(0.01)
        return ToolResult(Outcome.OK, "waited")

    async def close(self, traj_id: str) -> None:
        self.closed.append(traj_id)


def a_task(i: int = 0) -> RolloutTask:
    return RolloutTask(problem(f"p{i}", 1.0), traj_id=f"t{i}", group_id=f"g{i}", sample=0, seed=3)


async def go(
    tasks,
    engines,
    tool: Tool,
    *,
    policy: str = "adaptive",
    limits: LimitsSection = LimitsSection(max_response_tokens=4000),
    **options,
):
    made = make_policy(policy, max_context=4500, predictor=LengthPredictor(4000))
    slots = scheduled({f"e{i}": engine for i, engine in enumerate(engines)}, made)
    tools: dict[str, Tool] = {"wait": tool}
    context = RolloutContext(Codec(TOKENIZER, tools), tools, right, limits)
    return await run_rollouts(tasks, context, slots=slots.slot, **options)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
async def test_time_limit_of_a_rollout_ends_a_turn_in_progress(policy):
    engine, tool = TokenByTokenEngine([CALL, ANSWER]), Wait()
    engine.ticks = 3 * len(engine.turns[0]) + 20
    limits = LimitsSection(max_response_tokens=4000, time_limit_s=0.7)
    done = await go([a_task(i=i) for i in range(3)], [engine], tool, policy=policy, limits=limits)
    assert [t.stop_reason for t in done] == [StopReason.TIME_LIMIT] * 3
    assert engine.cancelled and not engine.open, "the requests were cancelled in the engine too"
    assert all(len(t.turns) <= 1 for t in done) and sorted(tool.closed) == ["t0", "t1", "t2"]


async def test_a_held_turn_that_times_out_frees_its_place():
    engine = TokenByTokenEngine([ANSWER], ticks=5)
    policy = make_policy("kv", max_context=10**6, predictor=LengthPredictor(4000))  # one rollout at a time
    slots = scheduled({"e": engine}, policy)
    tools: dict[str, Tool] = {"wait": Wait()}

    async def roll(tasks, limits):
        context = RolloutContext(Codec(TOKENIZER, tools), tools, right, limits)
        return await run_rollouts(tasks, context, slots=slots.slot)

    first = await roll([a_task(i=i) for i in range(3)], LimitsSection(max_response_tokens=4000, time_limit_s=0.2))
    assert [t.stop_reason for t in first] == [StopReason.TIME_LIMIT] * 3
    engine.ticks = 10**9
    (later,) = await roll([a_task(i=0)], LimitsSection(max_response_tokens=4000))
    assert later.stop_reason is StopReason.ANSWERED


async def test_time_limit_of_a_rollout_applies_in_lockstep():
    engine = ScriptedEngine(TOKENIZER, lambda prompt, turn: ANSWER, 60.0)
    lockstep = Lockstep([engine], ["g", "g"])
    context = RolloutContext(Codec(TOKENIZER, {}), {}, right, LimitsSection(max_response_tokens=4000, time_limit_s=0.2))
    done = await run_rollouts([a_task(i=i) for i in range(2)], context, slots=lockstep.slot)
    assert [t.stop_reason for t in done] == [StopReason.TIME_LIMIT] * 2


async def test_only_tokens_of_the_newest_policy_are_checked_for_mismatch():
    (done,) = await go([a_task()], [TokenByTokenEngine([CALL, ANSWER])], Wait())
    first = done.turns[0].end - done.turns[0].start
    versions = [((1, 6), (2, first - 6)), ((2, done.turns[1].end - done.turns[1].start),)]
    turns = tuple(replace(turn, versions=parts) for turn, parts in zip(done.turns, versions, strict=True))
    done = replace(done, turns=turns, policy_version=2)
    kept = Selection.of([done], [1.0])
    stale = np.asarray(done.token_versions) == 1
    log_probs = [np.where(stale, -9.0, -0.5)]
    found = engine_mismatch(kept, log_probs, version=2)
    assert found.mean == 0.0 and found.policy_gap > 0.5
    for version in (None, 1):
        with pytest.raises(MismatchError):
            check_mismatch_limit(engine_mismatch(kept, log_probs, version).mean, 1e-6)
