"""Tests of stages: when a stage ends, the model and problems of the next, and resumption after a kill."""

import pyarrow.parquet as pq
import pytest
from helpers.scripted_training import metrics_without_times, problem, train, weights
from pydantic import ValidationError

from rstar_lab.common.errors import UserError
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import DifficultyFilter, HandOff, Stage
from rstar_lab.rl.training.stages import (
    difficulty_file,
    difficulty_table,
    hand_off_trigger,
    stage_end_reason,
    stage_model,
    without_solved,
)
from rstar_lab.rl.training.trainer import Trainer
from rstar_lab.runs.reader import RunReader

MIXED = [problem(f"easy{i}", 1.0) for i in range(3)] + [problem(f"mixed{i}", 0.5) for i in range(3)]
PROBLEMS = {"one": MIXED, "two": MIXED}


def lines(**columns: list[float]) -> list[dict[str, float]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def test_hand_off_triggers():
    solved = HandOff(solved_groups=0.7, window=2)
    steps = lines(solved_groups=[0.9, 0.4, 0.9, 0.5], truncated=[0.5, 0.3, 0.12, 0.10])
    assert [hand_off_trigger(solved, steps[:n]) for n in range(5)] == [None, None, None, None, "solved_groups"]
    plateau = HandOff(truncation_plateau=0.05, window=1)
    assert [hand_off_trigger(plateau, steps[:n]) for n in range(5)] == [None, None, None, None, "truncation_plateau"]
    assert hand_off_trigger(HandOff(truncation_plateau=0.3, window=2), steps) == "truncation_plateau"
    assert hand_off_trigger(HandOff(truncation_plateau=0.28, window=2), steps) is None
    never_truncated = lines(solved_groups=[0.5] * 4, truncated=[0.0] * 4)
    assert hand_off_trigger(plateau, never_truncated) is None, "a plateau needs truncated rollouts"
    none_yet = lines(solved_groups=[None, None], truncated=[0.0, 0.0])  # type: ignore[list-item]
    assert hand_off_trigger(solved, none_yet) is None
    stage = Stage(name="s", problems={"synthetic": {"count": 1}}, steps=3, hand_off=solved)  # type: ignore[arg-type]
    assert stage_end_reason(stage, steps[:2]) is None and stage_end_reason(stage, steps[:3]) == "steps"
    with pytest.raises(ValidationError, match="give at least one of solved_groups"):
        HandOff(window=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trigger", "limit", "first", "truncated"),
    [
        ("solved_groups", 1.0, ("easy", 1.0), [0, 0]),
        # At step 6, two windows of two steps have equal means for the first time.
        ("truncation_plateau", 0.25, ("long", 0.5, ", brief from 2"), [1, 1, 0, 0, 0, 0]),
    ],
)
async def test_a_trigger_ends_a_stage_and_the_next_starts(tmp_path, trigger, limit, first, truncated):
    last = len(truncated)
    stages = [{"name": "one", "steps": 9, "hand_off": {trigger: limit, "window": 2}}, {"name": "two", "steps": 2}]
    problems = {"one": [problem(*first)], "two": MIXED}
    _, uninterrupted = await train(tmp_path / "uninterrupted", stages, problems, checkpoint_every=5)
    assert [line["stage"] for line in metrics_without_times(uninterrupted)] == ["one"] * last + ["two"] * 2
    assert [line["truncated"] for line in metrics_without_times(uninterrupted)[:last]] == truncated
    table = RunReader(uninterrupted).info["result"]["stages"]
    assert (table[0]["ended_by"], table[0]["last_step"]) == (trigger, last)
    assert table[1]["parent"] == {"run": "s-rl", "step": last} and table[1]["ended_by"] == "steps"
    assert weights(stage_model(uninterrupted, "two")) == weights(uninterrupted / f"checkpoints/step={last + 2:06d}")
    assert not (stage_model(uninterrupted, "one") / "optimizer.pt").exists()
    for stop in (1, last, last + 1):
        await train(tmp_path / "cut", stages, problems, checkpoint_every=5, stop_after=stop)
    _, cut = await train(tmp_path / "cut", stages, problems, checkpoint_every=5)
    again, _ = await train(tmp_path / "cut", stages, problems, checkpoint_every=5, trainer_class=Counting)
    assert not hasattr(again, "counts"), "a finished run ran another step"
    assert metrics_without_times(cut) == metrics_without_times(uninterrupted)
    assert RunReader(cut).info["result"]["stages"] == table
    for stage in ("one", "two"):
        assert weights(stage_model(cut, stage)) == weights(stage_model(uninterrupted, stage))


@pytest.mark.slow
async def test_the_filter_drops_solved_problems_and_runs_once(tmp_path):
    stages = [{"name": "one", "steps": 2}, {"name": "two", "steps": 3, "filter": {"samples": 8}}]
    await train(tmp_path, stages, PROBLEMS, stop_after=2)
    assert not difficulty_file(tmp_path / "s-rl", "two").exists()
    _, run_dir = await train(tmp_path, stages, PROBLEMS, stop_after=3)
    table = pq.read_table(difficulty_file(run_dir, "two")).to_pylist()
    assert {row["problem_id"] for row in table} == {p.problem_id for p in MIXED}
    assert all((row["samples"], row["step"], row["stage"], row["run_id"]) == (8, 2, "two", "s-rl") for row in table)
    assert [row["problem_id"] for row in table if not row["kept"]] == ["easy0", "easy1", "easy2"]
    assert all(row["solved"] == 8 and row["pass_rate"] == 1 for row in table if not row["kept"])
    filter_run = RunReader(tmp_path / "s-rl-two-filter")
    rows = filter_run.read("trajectories", columns=["problem_id", "reward"]).to_pylist()
    assert len(rows) == 8 * len(MIXED) and filter_run.info["parent"] == {"run": "s-rl", "step": 2}
    assert sum(row["reward"] for row in rows) == sum(row["solved"] for row in table)

    _, run_dir = await train(tmp_path, stages, PROBLEMS)
    assert RunReader(tmp_path / "s-rl-two-filter").info["attempts"] == 1, "the filter ran twice"
    drawn = RunReader(run_dir).read("trajectories", columns=["stage", "problem_id"]).to_pylist()
    assert {row["problem_id"] for row in drawn if row["stage"] == "two"} <= {"mixed0", "mixed1", "mixed2"}
    assert {row["problem_id"] for row in drawn if row["stage"] == "one"} & {"easy0", "easy1", "easy2"}
    assert RunReader(run_dir).info["result"]["stages"][1]["difficulty"] == "difficulty/stage=two.parquet"

    with pytest.raises(UserError, match="the filter keeps no problem"):
        alone: dict[str, list[Problem]] = {"one": MIXED[:3]}
        await train(tmp_path / "none", [{"name": "one", "steps": 1, "filter": {"samples": 2}}], alone)


class Counting(Trainer):
    """Records the step count of AdamW before each step."""

    async def step(self, stage, rl, pool):
        assert self.learner.optimizer
        state = self.learner.optimizer.state
        count = max((int(value["step"]) for value in state.values()), default=0)
        self.counts = [*getattr(self, "counts", []), count]
        return await super().step(stage, rl, pool)


@pytest.mark.slow
@pytest.mark.parametrize("reset", [False, True])
async def test_the_optimizer_is_reset_only_with_reset_optimizer(tmp_path, reset):
    mixed = {"one": [problem("mixed", 0.5)], "two": [problem("mixed", 0.5)]}
    stages = [{"name": "one", "steps": 2}, {"name": "two", "steps": 3, "reset_optimizer": reset}]
    # Dynamic sampling ensures that every step has an update.
    trainer, _ = await train(
        tmp_path / "uninterrupted", stages, mixed, trainer_class=Counting, schedule={"dynamic_sampling": 10}
    )
    assert trainer.counts == ([0, 1, 0, 1, 2] if reset else [0, 1, 2, 3, 4])  # type: ignore[attr-defined]
    await train(tmp_path / "cut", stages, mixed, stop_after=4, schedule={"dynamic_sampling": 10})
    trainer, _ = await train(tmp_path / "cut", stages, mixed, trainer_class=Counting, schedule={"dynamic_sampling": 10})
    assert trainer.counts == ([2] if reset else [4])  # type: ignore[attr-defined]


async def test_an_unreadable_checkpoint_is_an_error_with_its_file(tmp_path):
    _, run_dir = await train(tmp_path, [{"name": "one", "steps": 2}], {"one": MIXED}, stop_after=1)
    for text in ('{"step": 1}', "[]", "{"):
        (run_dir / "checkpoints/step=000001/trainer.json").write_text(text)
        with pytest.raises(UserError, match=r"step=000001/trainer.json: damaged"):
            await train(tmp_path, [{"name": "one", "steps": 2}], {"one": MIXED})


def test_the_filter_has_a_lower_and_an_upper_bound_and_sets_the_difficulty(tmp_path):
    rows = [
        {"problem_id": f"p{n}", "reward": float(i < n), "stop_reason": "answered"} for n in range(5) for i in range(4)
    ]
    rule, path = DifficultyFilter(samples=4, drop_below=0.2, drop_from=0.75), tmp_path / "table.parquet"

    def kept(rows):
        pq.write_table(difficulty_table(rows, rule, run_id="r", stage="s", step=1), path)
        problems = without_solved([problem(f"p{n}", 1.0) for n in range(5)], path)
        return [(p.problem_id, p.difficulty) for p in problems]

    assert kept(rows) == [("p1", 0.75), ("p2", 0.5)]
    # Rollouts without a valid reward are not failures: p0 stays, because it has no result, and p4 is always solved.
    rows = [row | {"stop_reason": "undecided"} if row["problem_id"] == "p0" else row for row in rows]
    rows += [{"problem_id": f"p{n}", "reward": 0.0, "stop_reason": "environment_error"} for n in (2, 4)]
    assert kept(rows) == [("p0", None), ("p1", 0.75), ("p2", 0.5)]
    assert pq.read_table(path)["samples"].to_pylist() == [0, 4, 4, 4, 4]
