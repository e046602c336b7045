"""Tests of injected sandbox failures: their share, that they repeat, and what they count as."""

from dataclasses import replace

import pytest
from helpers.trajectories import BATCH

from benchmarks.sandbox_faults import all_failures, fault_arms
from rstar_lab.outcomes import Outcome, count_errors
from rstar_lab.progress import Reporter
from rstar_lab.rl.algorithm.roc import tool_error_penalty
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.session import RunSession
from rstar_lab.rl.tools.code import FaultySandbox
from rstar_lab.rl.tools.registry import make_tools
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
    async with RunSession.open(recipe, Reporter()) as session:
        (tool,) = (await session.tools()).values()
        assert (await tool({"code": "1", "input": ""}, seed=0, traj_id="t")).outcome == Outcome.SANDBOX_ERROR


def test_the_arms_differ_in_whether_failures_of_the_sandbox_count():
    outcomes = (Outcome.OK, Outcome.SANDBOX_ERROR, Outcome.EXCEPTION, Outcome.OK)
    calls = tuple(ToolCallRecord(0, i, "python", "", outcome, "", 0.0, 0.0, 0) for i, outcome in enumerate(outcomes))
    assert all_failures(replace(BATCH[0], calls=calls)) == pytest.approx(2 / 4)
    assert tool_error_penalty(*count_errors(list(outcomes))) == pytest.approx(1 / 3)
    arms = fault_arms()
    assert list(arms) == ["0%", "5%", "5%, counted", "10%", "10%, counted", "20%", "20%, counted"]
    recipe = load_recipe("tiny", arms["20%, counted"])
    assert recipe.sandbox.fault_share == 0.2
    penalty, other = recipe.rl.hooks[0].penalties
    assert callable(penalty) and penalty(replace(BATCH[0], calls=calls)) == pytest.approx(2 / 4) and other == "format"
