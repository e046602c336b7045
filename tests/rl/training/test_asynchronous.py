"""Tests of the modes one_step_off and async: versions of tokens, staleness, resume, and the keys they require."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.scripted_training import Player, problem, recipe_of, train

from rstar_lab.rl.engine import Completion, FinishReason, Sampling
from rstar_lab.rl.recipe import RecipeError
from rstar_lab.rl.renderers.paper import END_OF_TURN, render_tool_call
from rstar_lab.rl.section import merged
from rstar_lab.rl.tools.user import UserTool
from rstar_lab.runs.reader import RunReader

KEYS = {"correction": {"type": "tis"}, "problems_per_step": 3}
SCHEDULES = {"one_step_off": {"type": "one_step_off"}, "async": {"type": "async", "max_staleness": 2}}
PROBLEMS = {"one": [problem(f"p{i}", 0.5) for i in range(40)]}


def stage(steps: int) -> list[dict[str, Any]]:
    return [{"name": "one", "steps": steps}]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return RunReader(run_dir).read("trajectories").to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one_step_off", "async"])
async def test_every_group_is_trained_on_once_and_staleness_stays_in_bounds(tmp_path, mode):
    _, run_dir = await train(tmp_path, stage(12), PROBLEMS, slow_s=0.2, schedule=SCHEDULES[mode], **KEYS)
    lines = RunReader(run_dir).metrics()
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(line["groups"] == 3 and line["dropped_groups"] == 0 for line in lines)
    assert max(line["staleness_max"] for line in lines) <= (1 if mode == "one_step_off" else 2)
    assert max(line["staleness_max"] for line in lines) >= 1
    groups = {row["group_id"]: row["problem_id"] for row in rows(run_dir)}
    assert sorted(groups.values()) == sorted({row["problem_id"] for row in rows(run_dir)})
    assert len(groups) == 36 and len(rows(run_dir)) == 36 * 4
    # The generation of a step began before the update of the step before it.
    assert all(row["policy_version"] < row["step"] for row in rows(run_dir))
    assert any(row["policy_version"] < row["step"] - 1 for row in rows(run_dir))


@pytest.mark.slow
async def test_drop_stores_what_it_leaves_out_and_counts_it(tmp_path):
    schedule = {"type": "async", "when_stale": "drop", "max_staleness": 0, "buffer_groups": 12}
    _, run_dir = await train(tmp_path, stage(12), PROBLEMS, slow_s=0.3, schedule=schedule, **KEYS)
    lines = RunReader(run_dir).metrics()
    dropped = sum(line["dropped_groups"] for line in lines)
    assert dropped > 0 and max(line["staleness_max"] for line in lines) == 0
    assert len({row["group_id"] for row in rows(run_dir)}) == 36 + dropped
    assert sum(line["dropped_share"] * (line["groups"] + line["dropped_groups"]) for line in lines) == pytest.approx(
        dropped
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one_step_off", "async"])
async def test_a_killed_run_trains_no_group_twice_and_loses_none(tmp_path, mode):
    keys = KEYS | {"schedule": SCHEDULES[mode], "checkpoint_every": 2}
    await train(tmp_path, stage(12), PROBLEMS, stop_after=5, slow_s=0.2, **keys)
    checkpoint = json.loads((tmp_path / "s-rl" / "checkpoints" / "step=000004" / "trainer.json").read_text())
    in_flight = {tuple(entry) for entry in checkpoint["carried"]}
    used = {row["problem_id"] for row in rows(tmp_path / "s-rl") if row["step"] <= 4}
    assert in_flight and len(used | {name for _, name in in_flight}) == checkpoint["position"]
    _, run_dir = await train(tmp_path, stage(12), PROBLEMS, slow_s=0.2, **keys)
    assert len(RunReader(run_dir).metrics()) == 12
    groups = {row["group_id"]: row["problem_id"] for row in rows(run_dir)}
    assert len(groups) == len(set(groups.values())) == 36  # 40 problems: none was drawn twice
    assert in_flight <= set(groups.items())
    assert len({row["traj_id"] for row in rows(run_dir)}) == len(rows(run_dir)) == 36 * 4


@pytest.mark.slow
async def test_stages_can_have_different_modes(tmp_path):
    stages = [
        {"name": "one", "steps": 3, "schedule": {"type": "async"}},
        {"name": "two", "steps": 2, "schedule": {"type": "sync"}},
        {"name": "three", "steps": 3, "schedule": {"type": "one_step_off"}},
    ]
    problems = {stage["name"]: PROBLEMS["one"] for stage in stages}
    trainer, run_dir = await train(tmp_path, stages, problems, **KEYS)
    assert [line["stage"] for line in RunReader(run_dir).metrics()] == ["one"] * 3 + ["two"] * 2 + ["three"] * 3
    assert trainer.engines.engines[0].versions[-1] == trainer.rollouts.versions[-1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"schedule": {"lockstep": True}}, r"rl.schedule.lockstep: not a key of type: async; it belongs to sync"),
        ({"correction": {"type": "none"}}, "set correction"),
        ({"correction": {"type": "none"}, "old_log_probs": "engine"}, "allow_uncorrected"),
        ({"schedule": {"dynamic_sampling": 2}}, r"rl.schedule.dynamic_sampling: not a key of type: async"),
        ({"schedule": {"buffer_groups": 2}}, "at least problems_per_step, 3"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(RecipeError, match=message):
        recipe_of(stage(1), **merged(KEYS | {"schedule": {"type": "async"}}, keys))
    recipe_of(
        stage(1), **(KEYS | {"schedule": {"type": "async", "allow_uncorrected": True}, "correction": {"type": "none"}})
    )


class CallingPlayer(Player):
    """An engine that calls the tool `wait` in the first turn and answers in the second."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        if self.tokenizer.decode(prompt_ids).count("<|im_start|>assistant") > 1:
            return await super().generate(prompt_ids, sampling)
        ids = self.tokenizer.encode(
            f"so</reason>\n{render_tool_call('wait', {})}{END_OF_TURN}", add_special_tokens=False
        )
        return Completion(ids, [-0.5] * len(ids), FinishReason.STOP, self.name, self.versions[-1])


@pytest.mark.slow
async def test_a_full_buffer_and_tools_that_hang_do_not_block_the_run(tmp_path):
    calls = itertools.count()

    async def wait() -> str:
        """Wait."""
        if next(calls) % 7 == 0:
            await asyncio.sleep(3600)
        return "waited"

    tool = UserTool("tests:wait", wait, 0.3)
    schedule = {"type": "async", "max_staleness": 1, "buffer_groups": 3}
    keys = KEYS | {"schedule": schedule, "limits": {"max_response_tokens": 200}}
    work = train(tmp_path, stage(6), PROBLEMS, engine=CallingPlayer(), tools={"wait": tool}, **keys)
    _, run_dir = await asyncio.wait_for(work, 120)
    assert len(RunReader(run_dir).metrics()) == 6
    outcomes = [row["outcome"] for row in RunReader(run_dir).read("calls").to_pylist()]
    assert outcomes.count("timeout") == len([n for n in range(len(outcomes)) if n % 7 == 0])
