"""Tests of rollouts that the end of a step cuts off: their tokens are kept and continued in the next step."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import scripted_training
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_training import TOKENIZER, problem, recipe_of, right
from helpers.scripted_training import train as train_scripted
from helpers.slots import scheduled

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.engine import Completion, FinishReason, Sampling
from rstar_lab.rl.recipe import RecipeError
from rstar_lab.rl.renderers.paper import END_OF_TURN, render_tool_call
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutLimits, RolloutTask
from rstar_lab.rl.rollout.records import messages
from rstar_lab.rl.rollout.run import run_rollouts
from rstar_lab.rl.scheduling.lengths import LengthPredictor
from rstar_lab.rl.scheduling.policies import POLICIES, make_policy
from rstar_lab.rl.scheduling.slots import Lockstep
from rstar_lab.rl.section import merged
from rstar_lab.rl.step import MismatchError, check_mismatch_limit, engine_mismatch
from rstar_lab.rl.tools.base import Tool, ToolResult
from rstar_lab.rl.trajectory import StopReason, Trajectory
from rstar_lab.runs.reader import RunReader

CALL = "think</reason>\n" + render_tool_call("wait", {})
ANSWER = " so it is</reason><answer>\\boxed{7}</answer>"


class TokenByTokenEngine:
    """An interruptible engine that returns a script token by token. ticks: tokens after which it ends the step and stalls."""

    kv_tokens, name = 10**6, "typist"

    def __init__(self, turns: list[str], version: int = 0, ticks: int = 10**9):
        self.turns = [TOKENIZER.encode(text + END_OF_TURN, add_special_tokens=False) for text in turns]
        self.version, self.ticks = version, ticks
        self.step_ended = asyncio.Event()
        self.open: set[asyncio.Event] = set()
        self.written = self.cancelled = 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        prompt = str(TOKENIZER.decode(prompt_ids))
        turn = self.turns[prompt.count("<|im_start|>assistant") - 1]
        partial = TOKENIZER.encode(prompt.rpartition("<reason>")[2], add_special_tokens=False)
        assert turn[: len(partial)] == partial
        cut = asyncio.Event()
        tokens: list[int] = []
        self.open.add(cut)
        try:
            for token in turn[len(partial) :]:
                if not self.ticks:
                    self.step_ended.set()
                    await cut.wait()
                if cut.is_set():
                    return Completion(tokens, [-0.5] * len(tokens), FinishReason.ABORTED, self.name, self.version)
                self.ticks -= 1
                self.written += 1
                tokens.append(token)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open.discard(cut)
        return Completion(tokens, [-0.5] * len(tokens), FinishReason.STOP, self.name, self.version)

    def interrupt(self) -> None:
        for cut in self.open:
            cut.set()


class UninterruptibleEngine(ScriptedEngine):
    """A slow engine that cannot be interrupted."""

    cancelled = 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        try:
            return await super().generate(prompt_ids, sampling)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class Wait:
    """A tool that waits. Records which trajectories were closed."""

    schema = {  # noqa: RUF012
        "type": "function",
        "function": {"name": "wait", "description": "", "parameters": {"type": "object", "properties": {}}},
    }

    def __init__(self, ends: asyncio.Event | None = None):
        self.ends = ends
        self.closed: list[str] = []

    async def __call__(self, arguments, *, seed: int, traj_id: str) -> ToolResult:
        if self.ends:
            self.ends.set()
        await asyncio.sleep(0.01)
        return ToolResult(Outcome.OK, "waited")

    async def close(self, traj_id: str) -> None:
        self.closed.append(traj_id)


def a_task(partial: Trajectory | None = None, i: int = 0) -> RolloutTask:
    return RolloutTask(problem(f"p{i}", 1.0), traj_id=f"t{i}", group_id=f"g{i}", sample=0, seed=3, partial=partial)


async def go(
    tasks, engines, tool: Tool, *, policy: str = "adaptive", limits: RolloutLimits = RolloutLimits(4000), **options
):
    made = make_policy(policy, max_context=4500, predictor=LengthPredictor(4000))
    slots = scheduled({f"e{i}": engine for i, engine in enumerate(engines)}, made)
    tools: dict[str, Tool] = {"wait": tool}
    context = RolloutContext(Codec(TOKENIZER, tools), tools, right, limits)
    return await run_rollouts(tasks, context, slots=slots.slot, **options)


@pytest.fixture
async def uninterrupted() -> Trajectory:
    (done,) = await go([a_task()], [TokenByTokenEngine([CALL, ANSWER])], Wait())
    return done


@pytest.mark.parametrize("ticks", [1, 9, 10**6])
async def test_a_rollout_cut_into_pieces_equals_the_uninterrupted_one(uninterrupted, ticks):
    """Cut the rollout after every `ticks` tokens. Each piece is generated by another policy version."""
    partial, pieces, tool = None, 0, Wait()
    wrote: list[int] = []
    while partial is None or partial.stop_reason is StopReason.UNFINISHED:
        engine = TokenByTokenEngine(
            [CALL, ANSWER], version=pieces, ticks=0 if pieces == 1 else ticks
        )  # one step ends before any token
        (partial,) = await go([a_task(partial)], [engine], tool, step_ended=engine.step_ended, carry_over=True)
        wrote += [pieces] * engine.written
        pieces += 1
        assert partial.stop_reason in (StopReason.UNFINISHED, StopReason.ANSWERED)
        assert tool.closed == ([] if partial.stop_reason is StopReason.UNFINISHED else ["t0"])
        assert partial.response_ids == uninterrupted.response_ids[: len(partial.response_ids)]
    for name in ("response_ids", "loss_mask", "log_probs", "prompt_ids", "reward", "text", "answer", "p_format"):
        assert getattr(partial, name) == getattr(uninterrupted, name), name
    assert [(t.start, t.end, t.text) for t in partial.turns] == [(t.start, t.end, t.text) for t in uninterrupted.turns]
    assert [replace(c, run_s=0, queue_s=0) for c in partial.calls] == [
        replace(c, run_s=0, queue_s=0) for c in uninterrupted.calls
    ]
    own = [v for v, mine in zip(partial.token_versions, partial.loss_mask, strict=True) if mine]
    assert own == wrote, "each token has the version that generated it"
    assert partial.policy_version == pieces - 1 and pieces == (1 if ticks == 10**6 else 1 + -(-len(own) // ticks))
    turns = [m for m in messages(partial) if m["role"] == "assistant"]
    if pieces > 1:
        assert [sum(n for _, n in m["policy_versions"]) for m in turns] == [t.end - t.start for t in partial.turns]
    else:
        assert not any("policy_versions" in m for m in turns)


async def test_without_carry_over_a_cut_rollout_ends_with_its_tokens(uninterrupted):
    tool = Wait()
    engine = TokenByTokenEngine([CALL, ANSWER], ticks=uninterrupted.turns[0].end + 5)
    (cut,) = await go([a_task()], [engine], tool, step_ended=engine.step_ended)
    assert cut.stop_reason is StopReason.TIME_LIMIT and cut.truncated and tool.closed == ["t0"]
    assert cut.response_ids == uninterrupted.response_ids[: uninterrupted.turns[1].start + 5] and len(cut.turns) == 2


async def test_a_tool_response_is_kept_if_the_step_ends_while_it_runs(uninterrupted):
    step_ended = asyncio.Event()
    tool = Wait(ends=step_ended)
    (cut,) = await go([a_task()], [TokenByTokenEngine([CALL, ANSWER])], tool, step_ended=step_ended, carry_over=True)
    assert cut.stop_reason is StopReason.UNFINISHED and cut.reward == 0.0
    assert cut.response_ids == uninterrupted.response_ids[: uninterrupted.turns[1].start], "the tool response is kept"
    (done,) = await go([a_task(cut)], [TokenByTokenEngine([CALL, ANSWER], version=4)], Wait(), carry_over=True)
    assert done.response_ids == uninterrupted.response_ids and [t.versions[0][0] for t in done.turns] == [0, 4]


@pytest.mark.parametrize("policy", POLICIES)
async def test_engines_that_cannot_be_interrupted_are_cancelled(policy):
    script = lambda prompt, turn: ANSWER if turn else CALL  # noqa: E731
    quick, slow = UninterruptibleEngine(TOKENIZER, script, 0.0), UninterruptibleEngine(TOKENIZER, script, 60.0)
    step_ended = asyncio.Event()
    ended: list[Trajectory] = []

    def progress(trajectory: Trajectory) -> None:
        ended.append(trajectory)
        if len(ended) == 4:
            step_ended.set()

    tasks = [a_task(i=i) for i in range(8)]
    engines = [quick, slow]
    done = await go(tasks, engines, Wait(), policy=policy, step_ended=step_ended, carry_over=True, on_rollout=progress)
    cut = [t for t in done if t.stop_reason is StopReason.UNFINISHED]
    assert len(cut) == 4 == slow.cancelled and all(t.reward == 1.0 for t in done if t not in cut)
    assert all(not t.response_ids for t in cut)
    tasks = [replace(task, partial=t) for task, t in zip(tasks, done, strict=True)]
    again = await go(tasks, [quick], Wait(), policy=policy, carry_over=True)
    assert [t.stop_reason for t in again] == [StopReason.ANSWERED] * 8
    assert all(new is old for new, old in zip(again, done, strict=True) if old not in cut), (
        "finished rollouts are kept unchanged"
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
async def test_time_limit_of_a_rollout_ends_a_turn_in_progress(policy):
    engine, tool = TokenByTokenEngine([CALL, ANSWER]), Wait()
    engine.ticks = 3 * len(engine.turns[0]) + 20
    limits = RolloutLimits(4000, time_limit_s=0.7)
    done = await go([a_task(i=i) for i in range(3)], [engine], tool, policy=policy, limits=limits)
    assert [t.stop_reason for t in done] == [StopReason.TIME_LIMIT] * 3
    assert engine.cancelled and not engine.open, "the requests were cancelled in the engine too"
    assert all(len(t.turns) <= 1 for t in done) and sorted(tool.closed) == ["t0", "t1", "t2"]


async def test_a_held_turn_that_times_out_frees_its_place():
    engine = TokenByTokenEngine([ANSWER], ticks=5)
    policy = make_policy("kv", max_context=10**6, predictor=LengthPredictor(4000))  # one rollout at a time
    slots = scheduled({"e": engine}, policy)
    tools: dict[str, Tool] = {"wait": Wait()}

    async def roll(tasks, limits):
        context = RolloutContext(Codec(TOKENIZER, tools), tools, right, limits)
        return await run_rollouts(tasks, context, slots=slots.slot)

    first = await roll([a_task(i=i) for i in range(3)], RolloutLimits(4000, time_limit_s=0.2))
    assert [t.stop_reason for t in first] == [StopReason.TIME_LIMIT] * 3
    engine.ticks = 10**9
    (later,) = await roll([a_task(i=0)], RolloutLimits(4000))
    assert later.stop_reason is StopReason.ANSWERED


async def test_time_limit_of_a_rollout_applies_in_lockstep():
    engine = UninterruptibleEngine(TOKENIZER, lambda prompt, turn: ANSWER, 60.0)
    lockstep = Lockstep([engine], ["g", "g"])
    context = RolloutContext(Codec(TOKENIZER, {}), {}, right, RolloutLimits(4000, time_limit_s=0.2))
    done = await run_rollouts([a_task(i=i) for i in range(2)], context, slots=lockstep.slot)
    assert [t.stop_reason for t in done] == [StopReason.TIME_LIMIT] * 2


def test_recipe_errors_name_what_carry_over_requires():
    good: dict[str, Any] = {
        "schedule": {"lockstep": False, "step_time_s": 5.0, "carry_over": True}, "old_log_probs": "engine",
    }  # fmt: skip
    assert recipe_of([], **good).rl.sync.carry_over
    changes: list[tuple[dict[str, Any], str]] = [
        ({"schedule": {"lockstep": True}}, "step_time_s cannot be combined with lockstep"),
        ({"schedule": {"step_time_s": None}}, "carry_over requires step_time_s"),
        ({"old_log_probs": "trainer"}, "carry_over requires old_log_probs: engine"),
        ({"schedule": {"dynamic_sampling": 2}}, "carry_over cannot be combined with dynamic_sampling"),
        ({"limits": {"time_limit_s": 0}}, "rl.limits.time_limit_s"),
    ]
    for change, message in changes:
        with pytest.raises(RecipeError, match=message):
            recipe_of([], **merged(good, change))


async def test_only_tokens_of_the_newest_policy_are_checked_for_mismatch(uninterrupted):
    engine = TokenByTokenEngine([CALL, ANSWER], version=1, ticks=6)
    (cut,) = await go([a_task()], [engine], Wait(), step_ended=engine.step_ended, carry_over=True)
    (done,) = await go([a_task(cut)], [TokenByTokenEngine([CALL, ANSWER], version=2)], Wait(), carry_over=True)
    kept = Selection.of([done], [1.0])
    stale = np.asarray(done.token_versions) == 1
    log_probs = [np.where(stale, -9.0, -0.5)]
    found = engine_mismatch(kept, log_probs, version=2)
    assert found.mean == 0.0 and found.policy_gap > 0.5
    for version in (None, 1):
        with pytest.raises(MismatchError):
            check_mismatch_limit(engine_mismatch(kept, log_probs, version).mean, 1e-6)


class SlowPlayer(scripted_training.Player):
    """A scripted engine in which some rollouts end only after new weights are loaded."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        if sampling.seed is not None and sampling.seed % 5 == 0 and not self.freed:
            await asyncio.sleep(600)
        done = await super().generate(prompt_ids, sampling)
        return replace(done, policy_version=self.versions[-1])

    freed = False

    async def load_weights(self, path: Path, version: int) -> None:
        await super().load_weights(path, version)
        self.freed = version % 2 == 1


STAGE = [{"name": "one", "steps": 6}]
POOL = {"one": [problem(f"p{i}", 0.5) for i in range(40)]}
CARRY: dict[str, Any] = {
    "schedule": {"lockstep": False, "step_time_s": 0.8, "carry_over": True}, "old_log_probs": "engine",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [None, 1])
async def test_carried_groups_are_neither_lost_nor_counted_twice(tmp_path, monkeypatch, stop_after):
    monkeypatch.setattr(scripted_training, "Player", SlowPlayer)
    if stop_after:
        trainer, run_dir = await train_scripted(tmp_path, STAGE, POOL, stop_after=stop_after, **CARRY)
        state = json.loads((sorted((run_dir / "checkpoints").iterdir())[-1] / "trainer.json").read_text())
        assert state["carried"], "no group was carried over"
        started = {group for group, _ in state["carried"]}
        assert started == {task.group_id for task in trainer.rollouts.carried}
    trainer, run_dir = await train_scripted(tmp_path, STAGE, POOL, **CARRY)
    reader = RunReader(run_dir)
    lines = reader.metrics()
    rows = reader.read("trajectories").to_pylist()
    names = [row["traj_id"] for row in rows]
    assert len(set(names)) == len(names)
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row["group_id"]] = sizes.get(row["group_id"], 0) + 1
    assert set(sizes.values()) == {4}, "groups are complete"
    begun_in = {row["traj_id"]: int(row["group_id"].split("-")[0]) for row in rows}
    late = [row for row in rows if begun_in[row["traj_id"]] < row["step"]]
    assert late and sum(line["carried"] for line in lines) > 0
    assert any(row["policy_version"] < row["step"] - 1 for row in late), (
        "a rollout of the group ended in the previous step"
    )
    problems = {row["group_id"]: row["problem_id"] for row in rows}
    carried = {task.group_id: task.problem.problem_id for task in trainer.rollouts.carried}
    assert len({**problems, **carried}) == trainer.state.position, (
        "each drawn problem was trained on or is carried over"
    )
    if stop_after:
        assert started <= set(sizes)
    assert any(line["stale_tokens"] for line in lines if line["stale_tokens"] is not None)
    assert all(line["step_s"] < 30 for line in lines)
