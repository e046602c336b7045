"""Tests of the background generation of groups: staleness, limits, order, errors."""

import asyncio
import random
from typing import Any

import pytest
from helpers.scripted_training import problem
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar_lab.common.errors import UserError
from rstar_lab.rl.recipe.rl import Async
from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.step import BufferedGroups
from rstar_lab.rl.training.group_stream import GroupStream


class Setting:
    """A stream whose groups take a random number of turns of the event loop, and a trainer that takes its batches."""

    def __init__(self, seed: int, steps: int, **options: Any):
        self.rng, self.versions, self.drawn = random.Random(seed), [0], 0
        self.update_turns = self.load_turns = self.most_open = 0
        self.stream = GroupStream(
            self.next_group,
            self.run_group,
            batch_groups=3,
            last_group=3 * steps,
            version=0,
            staleness=lambda version: sum(newer > version for newer in self.versions),
            **{"max_staleness": 1, "when_stale": "wait", "buffer_groups": 99, "capacity": 99, "whole_batches": False} | options,
        )  # fmt: skip

    def next_group(self) -> list[RolloutTask]:
        self.drawn += 1
        name = f"g{self.drawn}"
        return [RolloutTask(problem(name, 1.0), f"{name}-{i}", name, i, seed=0) for i in range(2)]

    async def run_group(self, tasks: list[RolloutTask]) -> list[Any]:
        for _ in range(self.rng.choice([1, 2, 3, 60])):
            self.most_open = max(self.most_open, len(self.stream.open))
            await asyncio.sleep(0)
        return list(tasks)

    async def train(self, steps: int) -> list[BufferedGroups]:
        batches = []
        self.stream.fill()
        for step in range(1, steps + 1):
            batches.append(await self.stream.take())
            if self.stream.whole_batches:
                self.stream.loaded(self.versions[-1])
            for _ in range(self.update_turns):
                await asyncio.sleep(0)
            if step % 4:  # each fourth step has no update
                self.versions.append(step)
            for _ in range(self.load_turns):
                await asyncio.sleep(0)
            if not self.stream.whole_batches:
                self.stream.loaded(self.versions[-1])
        return batches


def names(groups: list[Any]) -> list[str]:
    return [group[0].group_id for group in groups]


def test_the_default_buffer_holds_a_batch_of_every_staleness():
    assert [Async(max_staleness=most).groups(3) for most in range(4)] == [3, 6, 9, 12]
    assert Async(max_staleness=2, buffer_groups=5).groups(3) == 5


@given(
    seed=st.integers(0, 10**6),
    max_staleness=st.integers(0, 4),
    update_turns=st.integers(0, 80),
    load_turns=st.integers(0, 40),
    capacity=st.sampled_from([1, 2, 7, 99]),
    buffer_groups=st.sampled_from([3, 5, 99]),
)
@settings(max_examples=60, deadline=None)
def test_wait_uses_every_group_once_and_never_exceeds_the_bound(
    seed, max_staleness, update_turns, load_turns, capacity, buffer_groups
):
    async def run() -> None:
        setting = Setting(seed, 12, max_staleness=max_staleness, capacity=capacity, buffer_groups=buffer_groups)
        setting.update_turns, setting.load_turns = update_turns, load_turns
        batches = await asyncio.wait_for(setting.train(12), 20)
        used = [name for batch in batches for name in names(batch.used)]
        assert sorted(used) == sorted(f"g{n}" for n in range(1, 37))
        assert all(len(batch.used) == 3 and not batch.dropped for batch in batches)
        assert max(s for batch in batches for s in batch.staleness) <= max_staleness
        assert setting.most_open <= min(buffer_groups, 3 * (max_staleness + 1))
        assert not setting.stream.open

    asyncio.run(run())


@given(seed=st.integers(0, 10**6), when_stale=st.sampled_from(["drop", "trim"]), max_staleness=st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_without_waiting_updates_use_what_is_complete(seed, when_stale, max_staleness):
    async def run() -> None:
        options = {"max_staleness": max_staleness, "when_stale": when_stale, "buffer_groups": 9}
        setting = Setting(seed, 30, **options)
        batches = await asyncio.wait_for(setting.train(30), 20)
        used = [name for batch in batches for name in names(batch.used)]
        dropped = [name for batch in batches for name in names(batch.dropped)]
        assert len(used) == len(set(used)) == 90 and not set(used) & set(dropped)
        assert setting.most_open <= 9
        if when_stale == "drop":
            assert max(s for batch in batches for s in batch.staleness) <= max_staleness
        else:
            assert not dropped
        await setting.stream.aclose()

    asyncio.run(run())


async def test_drop_leaves_out_slow_groups_and_trim_trains_on_them():
    stale = {}
    for when_stale in ("drop", "trim"):
        setting = Setting(3, 40, max_staleness=1, when_stale=when_stale, buffer_groups=12)
        batches = await setting.train(40)
        stale[when_stale] = sum(len(batch.dropped) for batch in batches), max(s for b in batches for s in b.staleness)
        await setting.stream.aclose()
    assert stale["drop"][0] > 0 and stale["drop"][1] <= 1
    assert stale["trim"][0] == 0 and stale["trim"][1] > 1


async def test_one_step_off_generates_batches_with_the_weights_before_the_update():
    setting = Setting(1, 8, whole_batches=True)
    setting.update_turns = 5
    batches = await setting.train(8)
    assert [names(batch.used) for batch in batches] == [[f"g{3 * step + i}" for i in (1, 2, 3)] for step in range(8)]
    for batch in batches:
        assert len(set(batch.staleness)) == 1
    # Steps 4 and 8 have no update, so the groups after them are one update old, as all but those of the first two steps.
    assert [batch.staleness[0] for batch in batches] == [0, 1, 1, 1, 0, 1, 1, 1]


async def test_the_error_of_a_rollout_ends_the_wait_and_leaves_nothing_behind():
    setting = Setting(1, 8)

    async def fail(tasks: list[RolloutTask]) -> list[Any]:
        await asyncio.sleep(0.01)
        if tasks[0].group_id == "g2":
            raise UserError("the reward function failed")
        await asyncio.sleep(60)
        return []

    setting.stream.run_group = fail
    setting.stream.fill()
    with pytest.raises(UserError, match="reward function failed"):
        await asyncio.wait_for(setting.stream.take(), 5)
    before = setting.drawn
    assert len(await setting.stream.aclose()) == 6
    assert all(group.running.done() for group in setting.stream.open) and setting.drawn == before


async def test_a_stage_whose_problems_end_gives_a_smaller_batch():
    setting = Setting(1, 8)
    setting.stream.next_group = lambda: setting.next_group() if setting.drawn < 4 else None
    setting.stream.fill()
    assert len((await setting.stream.take()).used) == 3
    assert names((await setting.stream.take()).used) and not setting.stream.open
