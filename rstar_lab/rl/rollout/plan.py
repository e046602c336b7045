"""What is rolled out in which step: the same for the local trainer and for verl, and a pure function of the recipe."""

from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np

from rstar_lab.rl.problems import Problem
from rstar_lab.rl.rollout.driver import RolloutTask
from rstar_lab.rl.seeds import derive_seed, step_seed


def draw_problem(pool: Sequence[Problem], position: int, *, seed: int, stage: str) -> Problem:
    """The problem at `position` of a stage: an order of the whole pool for each pass through it, one after the other."""
    epoch, place = divmod(position, len(pool))
    return pool[_order(derive_seed(seed, "order", stage, epoch), len(pool))[place]]


def draw_problems(
    pool: Sequence[Problem], position: int, count: int, *, seed: int, stage: str, retired: Collection[str] = ()
) -> tuple[list[Problem], int]:
    """The next `count` problems of a stage and the position after them; retired ones (ids) are passed over.

    One at least must not be retired.
    """
    drawn: list[Problem] = []
    while len(drawn) < count:
        problem = draw_problem(pool, position, seed=seed, stage=stage)
        position += 1
        if problem.problem_id not in retired:
            drawn.append(problem)
    return drawn, position


@lru_cache(maxsize=2)
def _order(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)


def rollout_task(problem: Problem, *, run: str, seed: int, step: int, group: int, sample: int) -> RolloutTask:
    """One rollout of a step. seed: the recipe's; group: of this step, counted from 0."""
    return RolloutTask(
        problem,
        traj_id=f"{run}-{step:06d}-{group:04d}-{sample:02d}",
        group_id=f"{step:06d}-{group:04d}",
        sample=sample,
        seed=derive_seed(step_seed(seed, step), group, sample),
    )
