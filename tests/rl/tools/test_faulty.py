"""Tests of injected sandbox failures: their share, that they repeat, and what they count as."""

import pytest

from benchmarks.sandbox_faults import KEYS, evaluations_without_failures, fault_arms, zero_if_failed
from rstar_lab.common.outcomes import Outcome
from rstar_lab.common.progress import Reporter
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.reward import RolloutReward, make_reward
from rstar_lab.rl.session import RunSession
from rstar_lab.rl.tools.code import FaultySandbox
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.rl.training.trainer import Trainer
from rstar_lab.rl.trajectory import ToolCallRecord
from rstar_lab.sandbox.call import Call, CallResult


class CountingSandbox:
    """Answers every call with its code."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def run_many(self, calls):
        self.calls += calls
        return [CallResult(Outcome.OK, call.code, "", None, 0.01) for call in calls]


async def test_the_share_fails_and_the_others_keep_their_order():
    sandbox = FaultySandbox(inner := CountingSandbox(), 0.2)
    calls = [Call(f"print({i})", seed=i) for i in range(2000)]
    results = await sandbox.run_many(calls)
    failed = [result.outcome == Outcome.SANDBOX_ERROR for result in results]
    assert sum(failed) / 2000 == pytest.approx(0.2, abs=0.03)
    assert all(fault or result.stdout == call.code for fault, result, call in zip(failed, results, calls, strict=True))
    assert len(inner.calls) == 2000 - sum(failed), "a failed call does not run"
    again = await FaultySandbox(CountingSandbox(), 0.2).run_many(calls[::-1])
    assert [result.outcome for result in again[::-1]] == [result.outcome for result in results]


async def test_a_failed_call_stays_failed_after_its_retries():
    (tool,) = make_tools(["python"], CountingSandbox(), fault_share=0.5).values()
    results = [await tool({"code": "1", "input": ""}, seed=seed, traj_id="t") for seed in range(8)]
    assert {result.outcome for result in results} == {Outcome.OK, Outcome.SANDBOX_ERROR}
    assert "This is no fault of the code." in next(r.text for r in results if r.outcome == Outcome.SANDBOX_ERROR)
    (tool,) = make_tools(["python"], CountingSandbox()).values()
    assert (await tool({"code": "1", "input": ""}, seed=0, traj_id="t")).outcome == Outcome.OK


async def test_a_run_passes_the_share_of_its_recipe_to_the_tools(tmp_path):
    recipe = load_recipe("tiny", {"sandbox.fault_share": 1.0, "runs": str(tmp_path)})
    async with RunSession.open(resolve(recipe), Reporter()) as session:
        (tool,) = (await session.tools()).values()
        assert (await tool({"code": "1", "input": ""}, seed=0, traj_id="t")).outcome == Outcome.SANDBOX_ERROR


def test_the_arms_differ_in_what_becomes_of_rollouts_with_a_failed_call():
    outcomes = (Outcome.OK, Outcome.SANDBOX_ERROR, Outcome.EXCEPTION)
    calls = tuple(ToolCallRecord(0, i, "python", "", outcome, "", 0.0, 0.0, 0) for i, outcome in enumerate(outcomes))
    right = "</reason>\n<answer>\\boxed{4}</answer>"
    assert zero_if_failed(right, "4", calls=calls[::2]) == 1.0 and zero_if_failed(right, "4", calls=calls) == 0.0
    arms = fault_arms()
    assert list(arms) == ["0%", *(f"{n}%, {what}" for n in (5, 15, 50) for what in ("counted", "masked", "retried"))]
    recipes = {arm: load_recipe("tiny_fast", KEYS | {"model": "some/folder"} | keys) for arm, keys in arms.items()}
    assert recipes["50%, retried"].sandbox.fault_share == 0.5
    masks = {arm: recipe.rl.on_infrastructure_failure != "keep" for arm, recipe in recipes.items()}
    assert {arm for arm, masked in masks.items() if not masked} == {arm for arm in arms if "counted" in arm}
    assert isinstance(make_reward(recipes["5%, counted"].rl.reward), RolloutReward), "the reward reads the calls"


async def test_evaluations_have_no_failures_and_training_has(monkeypatch):
    seen = []

    async def evaluate(trainer, *_):
        seen.append(await FaultySandbox(CountingSandbox(), 1.0).run_many([Call("1", seed=0)]))
        return {}

    monkeypatch.setattr(Trainer, "evaluate_weights", evaluate)
    with evaluations_without_failures():
        await Trainer.evaluate_weights(None, None, 1)
        seen.append(await FaultySandbox(CountingSandbox(), 1.0).run_many([Call("1", seed=0)]))
    assert [result.outcome for (result,) in seen] == [Outcome.OK, Outcome.SANDBOX_ERROR]
