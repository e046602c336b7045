"""Rollouts outside of steps under verl: how many are in flight, their order, and a missing one. Scripted workers and buffer."""

from types import SimpleNamespace

import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.rl.evaluation import evaluation_task
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.verl import manager

pytestmark = pytest.mark.slow
SAMPLES, WINDOW = 4, 20


class Job:
    """The agent-loop workers and the replay buffer of a job. The newest groups finish first. lost: group without one rollout."""

    def __init__(self, lost: str = ""):
        self.agent_loop_workers, self.running, self.lost = [1, 2], [], lost
        self.most, self.announced, self.cleared, self.trained = 0, [], [], set()

    def begin_step(self, rollouts):
        self.announced.append(rollouts)

    def generate_evaluation(self, problems, *, run, samples, step, sampling):
        self.running += [[f"{run}-{p.problem_id}-{sample:03d}" for sample in range(samples)] for p in problems]
        self.most = max(self.most, samples * len(self.running))
        self.trained.add(sampling)

    def sample(self, *, global_steps, partition_id, batch_size):
        groups = [self.running.pop() for _ in range(batch_size)]
        keys = [key for group in groups for key in (group[:-1] if self.lost and self.lost in group[0] else group)]
        return SimpleNamespace(keys=keys), {}


async def generate(job, monkeypatch, problems=30):
    monkeypatch.setattr(
        manager, "fetch_rollouts", lambda keys, partition: [SimpleNamespace(traj_id=key) for key in keys]
    )
    monkeypatch.setattr(manager.tq, "kv_clear", lambda keys, partition_id: job.cleared.extend(keys))
    tasks = [
        [
            evaluation_task(Problem(problem_id=f"p{number}", question="?", answer="1"), run="f", sample=sample, seed=0)
            for sample in range(SAMPLES)
        ]
        for number in range(problems)
    ]
    chunks = [[task for group in tasks[start : start + 7] for task in group] for start in range(0, problems, 7)]
    rollouts = manager.ServerRollouts(job, job, WINDOW).generator("f", step=3, sampling="stage")
    done = [trajectory.traj_id async for chunk in rollouts(chunks) for trajectory in chunk]
    return done, [task.traj_id for chunk in chunks for task in chunk]


async def test_rollouts_come_in_order_and_the_window_bounds_what_is_in_flight(monkeypatch):
    job = Job()
    done, expected = await generate(job, monkeypatch)
    assert done == expected
    assert job.most == WINDOW and job.announced == [len(expected)] and job.trained == {"stage"}
    assert sorted(job.cleared) == sorted(expected) and not job.running


async def test_a_missing_rollout_is_an_error_that_names_the_run(monkeypatch):
    with pytest.raises(UserError, match="f: a rollout failed"):
        await generate(Job(lost="-p11-"), monkeypatch)


async def test_nothing_is_started_for_an_evaluation_that_is_complete(monkeypatch):
    job = Job()
    assert await generate(job, monkeypatch, problems=0) == ([], [])
    assert job.announced == []
