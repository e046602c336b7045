"""Order of problems and identity of rollouts: a pure function of the recipe, used by the local trainer and by verl."""

from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np

from rstar_lab.rl.environments.mixture import Mixture
from rstar_lab.rl.methods.samplers import NOTHING, History, Sampler
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.seeds import derive_seed, step_seed


def draw_problem(pool: Sequence[Problem], position: int, *, seed: int, stage: str) -> Problem:
    """Return the problem at `position` of a stage. Each pass through the pool has its own random order.

    A Mixture draws the problems of each environment in an order of their own.
    """
    if isinstance(pool, Mixture):
        environment, position = pool.draw(position)
        pool, stage = pool.parts[environment], f"{stage}/{environment}"
    epoch, place = divmod(position, len(pool))
    return pool[_order(derive_seed(seed, "order", stage, epoch), len(pool))[place]]


def draw_problems(
    pool: Sequence[Problem],
    position: int,
    count: int,
    *,
    seed: int,
    stage: str,
    retired: Collection[str] = (),
    sampler: Sampler | None = None,
    history: History | None = None,
) -> tuple[list[Problem], int]:
    """Return the next `count` problems of a stage and the position after them.

    retired: ids of problems to skip; at least one problem of the pool must not be retired. sampler: chooses the problems; None:
    a random order. history: results of the problems, for the sampler; the draws are added.
    """
    if sampler is not None:
        assert history is not None
        return _sample(pool, position, count, seed, stage, retired, sampler, history), position + count
    drawn: list[Problem] = []
    while len(drawn) < count:
        problem = draw_problem(pool, position, seed=seed, stage=stage)
        position += 1
        if problem.problem_id not in retired:
            drawn.append(problem)
    return drawn, position


def _sample(
    pool: Sequence[Problem],
    position: int,
    count: int,
    seed: int,
    stage: str,
    retired: Collection[str],
    sampler: Sampler,
    history: History,
) -> list[Problem]:
    """Return `count` problems with the highest scores. A Mixture keeps the shares of its environments.

    No problem is drawn twice unless there are fewer than `count`.
    """
    names = [pool.draw(position + i)[0] if isinstance(pool, Mixture) else "" for i in range(count)]
    parts = pool.parts if isinstance(pool, Mixture) else {"": pool}
    chosen: dict[str, list[Problem]] = {}
    for name, wanted in Counter(names).items():
        left = [problem for problem in parts[name] if problem.problem_id not in retired]
        left = left or [problem for problem in pool if problem.problem_id not in retired]
        rng = np.random.default_rng(derive_seed(seed, "sampler", stage, name, position))
        best = np.argsort(-sampler.scores(left, history, rng), kind="stable")
        chosen[name] = [left[best[i % len(best)]] for i in range(wanted)]
    for problems in chosen.values():
        for problem in problems:
            old = history.get(problem.problem_id, NOTHING)
            history[problem.problem_id] = old._replace(drawn=old.drawn + 1)
    return [chosen[name].pop(0) for name in names]


@lru_cache(maxsize=16)
def _order(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)


def group_name(step: int, group: int) -> str:
    """Return the id of a group: the step that started it, and its index in that step."""
    return f"{step:06d}-{group:04d}"


def parse_group_name(name: str) -> tuple[int, int]:
    """Return (step, index) of a group id; see `group_name`."""
    step, group = name.split("-")
    return int(step), int(group)


def rollout_task(problem: Problem, *, run: str, seed: int, step: int, group: int, sample: int) -> RolloutTask:
    """Return the task of one rollout of a step. seed: seed of the recipe; group: index in the step."""
    return RolloutTask(
        problem,
        traj_id=f"{run}-{group_name(step, group)}-{sample:02d}",
        group_id=group_name(step, group),
        sample=sample,
        seed=derive_seed(step_seed(seed, step), group, sample),
    )
