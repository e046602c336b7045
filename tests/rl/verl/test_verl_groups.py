"""Groups in a worker of verl: second attempts, the pause, and rewards of a group, without verl itself."""

import asyncio
from dataclasses import replace

import pytest
from helpers.trajectories import trajectory

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.rollout import run as rollout_run
from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.rollout.run import failure, retry_failed
from rstar_lab.rl.trajectory import ToolCallRecord
from rstar_lab.rl.verl.agent_loop import Groups

PROBLEM = Problem(problem_id="p", question="q", answer="1")
TASKS = [RolloutTask(PROBLEM, f"t{i}", "g", i, seed=i) for i in range(4)]


class Context:
    """A context without environments."""

    environment = None

    def of(self, problem):
        return self


def rollout(task, outcome):
    calls = (ToolCallRecord(0, 0, "python", "", outcome, "", 0, 0, 0),)
    made = trajectory(task.sample, 3, 4)
    return replace(made, traj_id=task.traj_id, calls=calls, policy_version=task.seed % 1000)


class Sandbox:
    """Fails the calls of the rollouts in `down` for the first `attempts` attempts of each."""

    def __init__(self, down, attempts):
        self.down, self.attempts, self.seen = set(down), attempts, dict[str, int]()

    async def generate(self, task):
        await asyncio.sleep(0.001 * (4 - task.sample))
        self.seen[task.traj_id] = self.seen.get(task.traj_id, 0) + 1
        failed = task.sample in self.down and self.seen[task.traj_id] <= self.attempts
        return rollout(task, Outcome.SANDBOX_ERROR if failed else Outcome.OK)


async def run_group(sandbox, *, retries=True):
    groups = Groups()
    joined = [groups.join(task, Context(), len(TASKS), retries) for task in TASKS]
    assert len({id(group) for group in joined}) == 1
    found = await asyncio.gather(
        *(group.run(task, sandbox.generate) for group, task in zip(joined, TASKS, strict=True)), return_exceptions=True
    )
    return found, joined[0]


@pytest.mark.parametrize(("down", "attempts"), [((), 0), ((1,), 1), ((1,), 9), ((0, 1, 2), 3), ((0, 1, 2, 3), 4)])
async def test_retries_and_pauses_are_those_of_the_local_trainer(down, attempts, monkeypatch, caplog):
    monkeypatch.setattr(rollout_run, "FIRST_PAUSE_S", 0.0)
    local = Sandbox(down, attempts)

    async def again(tasks):
        return [await local.generate(task) for task in tasks]

    expected, retried = await retry_failed(TASKS, await again(TASKS), again)
    pauses = [record.getMessage() for record in caplog.records]
    caplog.clear()
    found, group = await run_group(Sandbox(down, attempts))
    assert [(t.traj_id, failure(t), t.policy_version) for t in found] == [
        (t.traj_id, failure(t), t.policy_version) for t in expected
    ]
    assert group.retried.total() == retried
    assert [record.getMessage() for record in caplog.records] == pauses and bool(pauses) == (len(down) > 1)


async def test_a_rollout_that_raises_does_not_stop_its_group():
    class Broken(Sandbox):
        async def generate(self, task):
            if task.sample == 2:
                raise ValueError("a fault")
            return await super().generate(task)

    found, _ = await run_group(Broken((), 0))
    assert [type(one).__name__ for one in found] == ["Trajectory", "Trajectory", "ValueError", "Trajectory"]


async def test_without_retries_and_scores_of_groups_no_rollout_waits_for_others():
    assert Groups().join(TASKS[0], Context(), 4, retries=False) is None
