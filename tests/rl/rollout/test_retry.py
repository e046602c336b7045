"""Second attempts at rollouts that failed through no fault of the model."""

import asyncio
import logging
from dataclasses import replace
from unittest.mock import AsyncMock

from helpers.trajectories import trajectory

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.rollout.run import failure, retry_failed, retry_task
from rstar_lab.rl.trajectory import StopReason, ToolCallRecord

PROBLEM = Problem(problem_id="p", question="q", answer="1")


def rollout(i, outcome=Outcome.OK, stop=StopReason.ANSWERED):
    calls = (ToolCallRecord(0, 0, "python", "", outcome, "", 0, 0, 0),)
    return replace(trajectory(i, 3, 4), traj_id=f"t{i}", calls=calls, stop_reason=stop)


def tasks(count):
    return [RolloutTask(PROBLEM, f"t{i}", "g", i, seed=i) for i in range(count)]


def test_failures_of_the_model_are_not_failures_of_the_infrastructure():
    assert failure(rollout(0)) is None and failure(rollout(0, Outcome.TIMEOUT)) is None
    assert failure(rollout(0, Outcome.SANDBOX_ERROR)) == "sandbox_error"
    assert failure(rollout(0, stop=StopReason.ENGINE_ERROR)) == "engine_error"
    task = tasks(1)[0]
    assert retry_task(task, 1).seed != task.seed != retry_task(task, 2).seed
    assert retry_task(task, 1).traj_id == task.traj_id


async def test_only_failed_rollouts_are_generated_once_more():
    first = [
        rollout(0),
        rollout(1, Outcome.SANDBOX_ERROR),
        rollout(2, stop=StopReason.ENGINE_ERROR),
        rollout(3),
        rollout(4),
    ]
    seen = []

    async def run(again):
        seen.append([task.traj_id for task in again])
        return [rollout(1), rollout(2, Outcome.QUEUE_TIMEOUT)]

    found, attempts = await retry_failed(tasks(5), first, run)
    assert seen == [["t1", "t2"]] and attempts == 2
    assert [failure(t) for t in found] == [None, None, "queue_timeout", None, None]


async def test_a_run_pauses_while_most_rollouts_fail_and_goes_on_by_itself(caplog, monkeypatch):
    sleep = AsyncMock()
    monkeypatch.setattr(asyncio, "sleep", sleep)

    async def run(again):
        down = sleep.await_count < 3
        return [rollout(task.sample, Outcome.SANDBOX_ERROR if down else Outcome.OK) for task in again]

    with caplog.at_level(logging.WARNING):
        found, attempts = await retry_failed(tasks(4), [rollout(i, Outcome.SANDBOX_ERROR) for i in range(4)], run)
    assert [call.args[0] for call in sleep.await_args_list] == [5.0, 10.0, 20.0] and attempts == 16
    assert not any(map(failure, found))
    assert "4 of 4 rollouts failed through no fault of the model (4 sandbox_error)" in caplog.text
