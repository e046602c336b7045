"""Tests of concurrent rollouts: lockstep batches, the scheduler, and the overhead per rollout."""

import asyncio

import pytest
from helpers.scripted_engine import ScriptedEngine
from helpers.slots import scheduled

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.engine import Completion, EngineError, Sampling
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import LimitsSection
from rstar_lab.rl.renderers.paper import render_tool_call
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.run import run_rollouts
from rstar_lab.rl.scheduling.lengths import LengthPredictor
from rstar_lab.rl.scheduling.policies import make_policy
from rstar_lab.rl.scheduling.slots import Lockstep
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.rl.trajectory import StopReason
from rstar_lab.sandbox.call import Call, CallResult

CALL = "</reason>\n" + render_tool_call("execute_python_code_with_standard_io", {"code": "print(1)", "input": ""})
ANSWER = "</reason>\n<answer>\\boxed{1}</answer>"


class Echo:
    """The interface of the sandbox without a sandbox, so that tests measure only the driver."""

    async def run_many(self, calls: list[Call]) -> list[CallResult]:
        await asyncio.sleep(0)
        return [CallResult(Outcome.OK, "1\n", "", None, 0.0) for _ in calls]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some text of a test"], 300)


def tasks(count: int, group_size: int = 4) -> list[RolloutTask]:
    return [
        RolloutTask(
            Problem(problem_id=f"p{i // group_size}", question=f"Question {i // group_size}", answer="1"),
            traj_id=f"t{i}", group_id=f"g{i // group_size}", sample=i % group_size, seed=i,
        )
        for i in range(count)
    ]  # fmt: skip


async def go(tokenizer, wanted, slots, turns: int = 8):
    tools = make_tools(["python"], Echo())
    limits = LimitsSection(max_response_tokens=100_000, max_turns=turns)
    context = RolloutContext(Codec(tokenizer, tools), tools, lambda text, answer: float("boxed{1}" in text), limits)
    return await run_rollouts(wanted, context, slots=slots)


class Recorder(ScriptedEngine):
    """An engine for rollouts with different numbers of turns. Records each submitted batch."""

    def __init__(self, tokenizer, name="e"):
        super().__init__(
            tokenizer, lambda prompt, turn: ANSWER if turn >= int(prompt[prompt.index("Question") + 9]) % 3 else CALL
        )
        self.name = name
        self.batches: list[list[list[int]]] = []

    def submit(self, requests):
        self.batches.append([prompt for prompt, _ in requests])
        return super().submit(requests)


async def test_lockstep_batches_are_reproducible_and_groups_share_an_engine(tokenizer):
    seen = []
    for _ in range(2):
        engines = [Recorder(tokenizer, "a"), Recorder(tokenizer, "b")]
        wanted = tasks(24)
        lockstep = Lockstep(engines, [task.group_id for task in wanted])
        done = await go(tokenizer, wanted, lambda i, task, lockstep=lockstep: lockstep.slot(i))
        assert [t.traj_id for t in done] == [task.traj_id for task in wanted]
        assert all(t.reward == 1.0 for t in done)
        assert len({(t.group_id, t.engine) for t in done}) == 6
        seen.append([engine.batches for engine in engines])
    assert seen[0] == seen[1]
    # Each engine receives one batch per turn until all its rollouts have ended.
    assert [[len(batch) for batch in batches] for batches in seen[0]] == [[12, 8, 4], [12, 8, 4]]


async def test_rollouts_of_a_failed_engine_continue_on_another(tokenizer):
    class Dying(ScriptedEngine):
        async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
            if len(self.prompts) > 5:
                raise EngineError("dead")
            return await super().generate(prompt_ids, sampling)

    script = lambda prompt, turn: ANSWER if turn else CALL  # noqa: E731
    engines = [Dying(tokenizer, script, 0.01), ScriptedEngine(tokenizer, script, 0.01)]
    engines[1].name = "living"
    slots = scheduled({e.name: e for e in engines})
    done = await go(tokenizer, tasks(40), slots.slot)
    assert [t.reward for t in done] == [1.0] * 40
    assert all(len(t.turns) == 2 for t in done)
    assert not slots.scheduler.is_alive(engines[0].name) and sum(t.engine == "living" for t in done) > 30

    engines = [Dying(tokenizer, script, 0.01)]
    slots = scheduled({"only": engines[0]})
    done = await go(tokenizer, tasks(40), slots.slot)
    assert {t.stop_reason for t in done} >= {StopReason.ENGINE_ERROR}


@pytest.mark.parametrize("policy", ["least-in-flight", "adaptive", "kv"])
async def test_turns_that_arrive_after_the_last_engine_failed_are_errors(tokenizer, policy):
    """The engine fails while the tools of the other rollouts run."""

    class Slow(Echo):
        async def run_many(self, calls: list[Call]) -> list[CallResult]:
            await asyncio.sleep(0.1)
            return await super().run_many(calls)

    class Dying(ScriptedEngine):
        async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
            if len(self.prompts) > 2:
                await asyncio.sleep(0.01)
                raise EngineError("dead")
            return await super().generate(prompt_ids, sampling)

    engine = Dying(tokenizer, lambda prompt, turn: CALL)
    made = make_policy(policy, max_context=4000, predictor=LengthPredictor(4000))
    slots = scheduled({"only": engine}, made)
    tools = make_tools(["python"], Slow())
    limits = LimitsSection(max_response_tokens=100_000, max_turns=8)
    context = RolloutContext(Codec(tokenizer, tools), tools, lambda text, answer: 0.0, limits)
    done = await asyncio.wait_for(run_rollouts(tasks(4), context, slots=slots.slot), 10)
    assert {t.stop_reason for t in done} == {StopReason.ENGINE_ERROR}
