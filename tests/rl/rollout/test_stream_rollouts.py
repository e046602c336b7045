"""Tests of streamed rollouts: a bounded number in flight, without a barrier."""

import asyncio

import pytest
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_training import TOKENIZER, problem
from helpers.slots import scheduled

from rstar_lab.rl.recipe import LimitsSection
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.run import stream_rollouts

ANSWER = "so</reason><answer>\\boxed{7}</answer>"
CONTEXT = RolloutContext(Codec(TOKENIZER, {}), {}, lambda text, answer: 1.0, LimitsSection(max_response_tokens=500))


class Gated(ScriptedEngine):
    """An engine that holds the first request until `gate` is set, and counts the requests in flight."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER, lambda prompt, turn: ANSWER)
        self.gate = asyncio.Event()
        self.requests = self.in_flight = self.most = 0

    async def generate(self, prompt_ids, sampling):
        self.requests += 1
        number = self.requests
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await (self.gate.wait() if number == 1 else asyncio.sleep(0.001))
            return await super().generate(prompt_ids, sampling)
        finally:
            self.in_flight -= 1


def stream(engine, count: int, max_in_flight: int):
    tasks = [RolloutTask(problem(f"p{i}", 1.0), f"t{i}", f"g{i}", 0, i) for i in range(count)]
    slots = scheduled({"e": engine}).slot
    return stream_rollouts(iter(tasks), CONTEXT, slots=slots, max_in_flight=max_in_flight)


async def test_a_slow_rollout_does_not_delay_the_others():
    engine = Gated()
    finished = []
    async for trajectory in stream(engine, 40, 4):
        finished.append(trajectory.traj_id)
        if len(finished) == 36:
            engine.gate.set()
    assert sorted(finished) == sorted(f"t{i}" for i in range(40)) and "t0" not in finished[:36]
    assert engine.most == 4


async def test_an_abandoned_stream_cancels_its_rollouts():
    engine = Gated()
    async for _ in stream(engine, 40, 4):
        break
    await asyncio.sleep(0.05)
    assert engine.in_flight <= 3

    rollouts = stream(engine, 40, 4)
    await anext(rollouts)
    await rollouts.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(rollouts)
