"""A run with warm-up, a KL term, two stages and evaluations, step by step against what its recipe says.

Every option has a value away from its default, so that a step that ignores one differs from the recipe.
"""

from collections import Counter
from typing import ClassVar

import pytest
from helpers.scripted_training import Player, metrics_without_times, problem, train

from rstar_lab.analysis import curves
from rstar_lab.rl.engine import Completion, Sampling
from rstar_lab.rl.training.trainer import Trainer
from rstar_lab.runs.reader import RunReader

pytestmark = pytest.mark.slow
POOLS = {"warm": [problem(f"a{i}", 0.5) for i in range(4)], "hard": [problem(f"b{i}", 0.5) for i in range(3)]}
STAGES = [{"name": "warm", "steps": 3}, {"name": "hard", "steps": 2, "limits": {"max_response_tokens": 100}}]
OPTIONS = {
    "lr": 2e-3, "warmup_steps": 4, "mini_batches": 2, "max_grad_norm": 0.5,
    "method": {"kl_coefficient": 0.2, "roc": {"oversample": 2}},
}  # fmt: skip


class Watched(Trainer):
    """A trainer that notes the learning rate of each step."""

    rates: ClassVar[list[float]] = []

    async def step(self, stage, rl, pool):
        metrics = await super().step(stage, rl, pool)
        Watched.rates.append(self.learner.optimizer.param_groups[0]["lr"])
        return metrics


class Noting(Player):
    """An engine that notes the seed of every request."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self.seeds.append(sampling.seed)
        return await super().generate(prompt_ids, sampling)


async def run(folder, engine=None, every=2, **more):
    evaluated: list[int] = []

    async def evaluate(step: int):
        evaluated.append(step)
        return {"held": {"pass1": 0.5}}

    options = {"trainer_class": Watched, "evaluate": evaluate, "evaluate_every": every} | OPTIONS | more
    _, run_dir = await train(folder, STAGES, POOLS, engine=engine, **options)
    return RunReader(run_dir), evaluated


async def test_every_step_is_the_one_of_the_recipe(tmp_path):
    engine, Watched.rates = Noting(), []
    reader, evaluated = await run(tmp_path, engine)
    lines = reader.metrics()

    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["stage"] for line in lines] == ["warm"] * 3 + ["hard"] * 2
    # Curves are in the order of the steps, although the name of the second stage comes first.
    for where in (None, {"problem_id": [p.problem_id for pool in POOLS.values() for p in pool]}):
        assert curves(tmp_path, ["pass1"], where)["step"].tolist() == [1, 2, 3, 4, 5]
    updated = [line["step"] for line in lines if line.get("grad_norm") is not None]
    assert updated == [1, 2, 3, 4, 5], "with these seeds every step has groups with different rewards"
    # Each stage starts its own warm-up.
    assert Watched.rates == pytest.approx([2e-3 * i / 4 for i in (1, 2, 3, 1, 2)])
    # Weights are sent at the start, after each update, and once more after an evaluation, which clears the prefix cache.
    assert evaluated == [2, 4]
    assert engine.versions == [0, 1, 2, 2, 3, 4, 4, 5]
    assert [line.get("eval/held/pass1") for line in lines] == [None, 0.5, None, 0.5, None]
    # The reference of a stage is the model with which the stage starts.
    kl = [line["reference_kl"] for line in lines]
    assert min(kl) > 0 and kl[3] < kl[2] / 10

    rows = reader.read("trajectories").to_pylist()
    drawn = {step: Counter(row["problem_id"] for row in rows if row["step"] == step) for step in range(1, 6)}
    assert all(set(counts.values()) == {8} and len(counts) == 2 for counts in drawn.values())
    # A stage starts at the beginning of its own problems: the first pass takes each of them once.
    assert sorted([*drawn[1], *drawn[2]]) == ["a0", "a1", "a2", "a3"]
    assert len({*drawn[4], *drawn[5]}) == 3
    # Every rollout has a random stream of its own.
    first_requests = engine.seeds[:16]
    assert len(set(first_requests)) == 16 and len(set(engine.seeds)) == len(engine.seeds)


@pytest.mark.parametrize("stop", [1, 2])
async def test_a_run_that_ends_before_its_first_checkpoint_starts_again(tmp_path, stop):
    whole, _ = await run(tmp_path / "whole", checkpoint_every=3)
    await run(tmp_path / "cut", stop_after=stop, checkpoint_every=3)
    assert [line["step"] for line in RunReader(tmp_path / "cut/s-rl").metrics()] == list(range(1, stop + 1))
    again, evaluated = await run(tmp_path / "cut", checkpoint_every=3)
    assert evaluated == [2, 4]
    assert metrics_without_times(again.run_dir) == metrics_without_times(whole.run_dir)
    assert again.read("trajectories").num_rows == whole.read("trajectories").num_rows
