"""Tests of `rl.schedule.type: async` under verl: the bound on staleness, groups in flight, and a run that is killed and resumed."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pyarrow.dataset as ds
import pytest
import yaml
from helpers.vllm_servers import engines_of
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from benchmarks.verl_parity import RUN, prepare
from rstar_lab.hardware.local_ray import LocalRay
from rstar_lab.rl.engine import Completion, FinishReason
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.rollout.plan import group_name
from rstar_lab.rl.section import merged
from rstar_lab.rl.training.checkpoint import TrainerState
from rstar_lab.rl.verl.engine import EngineServer
from rstar_lab.rl.verl.manager import OversamplingManager
from rstar_lab.rl.verl.sampler import RocReplayBufferAsync
from rstar_lab.rl.verl.settings import stages_of
from rstar_lab.runs.reader import RunReader

BATCH = 3


def largest_staleness(buffer, max_staleness: int, seed: int) -> int:
    """Play 30 steps with groups of random duration; return the largest staleness of a group that a step uses.

    Starts groups as `trainer.AsyncTrainer` does. Raises AssertionError if a step waits although all groups have ended.
    """
    random_order, found = random.Random(seed), 0
    names = map(str, range(10**6))
    running, finished = buffer.running_keys["train"], buffer.finished_keys["train"]
    started = buffer.prompt_global_steps["train"]
    for step in range(1, 31):
        for _ in range(BATCH * (max_staleness + 1 if step == 1 else 1)):
            started[name := next(names)] = step
            running.add(name)
        while not buffer._has_enough_samples(step, "train", BATCH, set(finished)):
            assert running, f"step {step} waits for nothing"
            ended = random_order.choice(sorted(running))
            running.discard(ended)
            finished.add(ended)
        for name in ReplayBufferAsync._select_prompt_uids(buffer, "train", set(finished), BATCH)[0]:
            found = max(found, step - started.pop(name))
            finished.discard(name)
        buffer.versions = [*range(step + 1)]
    return found


def make_buffer(kind, max_staleness: int, when_stale: str = "wait"):
    """Return a replay buffer without a transfer queue."""
    buffer = kind.__new__(kind)
    for name in ("pending_keys", "running_keys", "finished_keys", "failure_keys"):
        setattr(buffer, name, defaultdict(set))
    buffer.partitions, buffer.prompt_global_steps = defaultdict(dict), defaultdict(dict)
    buffer.settings = SimpleNamespace(
        rl=RlSection(
            schedule={"type": "async", "max_staleness": max_staleness, "when_stale": when_stale},
            correction={"type": "tis"},
        )
    )
    buffer.max_off_policy_threshold, buffer.max_off_policy_strategy = max_staleness + 1, "wait"
    return buffer


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_wait_keeps_the_bound_and_never_waits_for_nothing(max_staleness):
    found = [largest_staleness(make_buffer(RocReplayBufferAsync, max_staleness), max_staleness, n) for n in range(20)]
    assert max(found) == max_staleness


def test_drop_counts_updates_and_not_steps():
    buffer = make_buffer(RocReplayBufferAsync, 1, "drop")
    buffer.finished_keys["train"] |= {"old", "new"}
    buffer.prompt_global_steps["train"] |= {"old": 1, "new": 4}
    buffer.versions = [0, 2]  # step 1 and step 3 trained on nothing
    assert buffer._stale_terminal_keys(4, "train") == set()
    buffer.versions = [0, 2, 3]
    assert buffer._stale_terminal_keys(4, "train") == {"old"}
    assert buffer._stale_terminal_keys(4, "val") == set()


# Groups in flight at a checkpoint


def manager_of(folder, **rl):
    """Return a manager without workers, at step 1."""
    schedule = {"type": "async", "max_staleness": 1}
    defaults = {"problems_per_step": 2, "group_size": 2, "schedule": schedule, "correction": {"type": "tis"}}
    rl = merged(defaults, rl)
    stage = {"name": "s", "problems": {"synthetic": {"count": 9}}, "steps": 5}
    recipe = parse_recipe({"name": "v", "model": "/models/m", "rl": rl, "stages": [stage]})
    (settings,) = stages_of(recipe, folder)
    config = {"rstar": settings.as_config(), "actor_rollout_ref": {"rollout": {}, "model": {}}}
    manager = OversamplingManager(OmegaConf.create(config), None)
    manager.step = 1
    return manager


def names_of(groups):
    return [(group_name(step, number), problem.problem_id) for step, number, problem in groups]


def test_groups_that_no_update_has_used_start_first_after_a_resume(tmp_path):
    before = manager_of(tmp_path)
    started = names_of(before._open_groups(3))
    assert before.unused() == started and before.state.position == 3
    before.close_groups([SimpleNamespace(group_id=started[1][0])] * 2)
    before.state.carried = before.unused()
    assert before.state.carried == [started[0], started[2]]
    before.state.step = 1
    (tmp_path / "trainer.json").write_text(json.dumps(asdict(before.state)))

    after = manager_of(tmp_path)
    after.resume(TrainerState.read(tmp_path))
    after.step = 2
    assert after.unused() == before.state.carried, "a second kill before the first step loses nothing"
    first = names_of(after._open_groups(1))
    assert first == started[:1]
    assert sorted(after.unused()) == sorted(before.state.carried)
    rest = names_of(after._open_groups(3))
    assert rest[0] == started[2] and [name for name, _ in rest[1:]] == ["000002-0000", "000002-0001"]
    assert [problem for _, problem in rest[1:]] == [problem for _, problem in names_of(before._open_groups(2))]
    assert len(dict(after.unused())) == 4 and after.state.position == 5


class CountingEngine:
    """Generates 0, 1, 2, ... slowly; `interrupt` ends all requests with what they have."""

    kv_tokens = 100

    def __init__(self):
        self.cut = asyncio.Event()

    async def start(self): ...

    async def load_weights(self, path, version): ...

    async def generate(self, prompt_ids, sampling):
        tokens = []
        while len(tokens) < sampling.max_tokens and not self.cut.is_set():
            await asyncio.sleep(0.005)
            tokens.append(len(tokens))
        reason = FinishReason.ABORTED if len(tokens) < sampling.max_tokens else FinishReason.LENGTH
        return Completion(tokens, [-1.0] * len(tokens), reason)

    def interrupt(self):
        self.cut.set()


def make_counting_engine(model, options):
    return CountingEngine()


async def test_a_server_cuts_its_requests_and_holds_new_ones_until_it_resumes():
    server = EngineServer(f"{__name__}:make_counting_engine", "", {})
    engine = server.engine
    await server.start()
    sampling = {"max_tokens": 60, "temperature": 1.0, "top_p": 1.0, "seed": 1, "stop_token_ids": []}

    def send():
        return asyncio.create_task(server.generate("r", prompt_ids=[1], sampling_params=sampling))

    held = [send() for _ in range(3)]
    await asyncio.sleep(0.05)
    await asyncio.wait_for(server.abort_all_requests(), 10)
    cut = [await task for task in held]
    assert all(output.stop_reason == "aborted" and 0 < len(output.token_ids) < 60 for output in cut)
    assert server.running == 0 and {output.extra_fields["global_steps"] for output in cut} == {0}
    engine.cut.clear()
    late = send()
    await server.load_weights("", 4)
    await asyncio.sleep(0.05)
    assert not late.done() and server.running == 0, "no request runs while weights are sent"
    await server.resume_generation()
    output = await asyncio.wait_for(late, 10)
    assert output.stop_reason == "completed" and output.extra_fields["global_steps"] == 4
    await asyncio.wait_for(server.abort_all_requests(), 10)  # without requests


KEYS = {
    "correction": {"type": "tis", "max_share": 1.0}, "problems_per_step": 4, "group_size": 2, "lr": 1e-4,
    "reward": "slow_engine:reward",
}  # fmt: skip
EVALUATE = {
    "sets": {"held": {"synthetic": {"count": 2, "seed": 9}}}, "during": {"every": 3}, "samples": 1, "max_response_tokens": 64,
}  # fmt: skip
SLOW = "verl.+actor_rollout_ref.rollout.engine_kwargs.rstar={factory: 'slow_engine:serve'}"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("engine", "when_stale"), [("slow", "wait"), ("slow", "drop"), ("vllm", "wait")])
def test_a_killed_run_trains_no_group_twice_and_loses_none(tmp_path, monkeypatch, engine, when_stale):
    """Run verl on two ranks with an engine each, kill the job after step 3 and run it again."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    # With drop, more groups are in flight than the bound allows, so some are left out.
    schedule = {"type": "async", "when_stale": when_stale, "max_staleness": 2}
    if when_stale == "drop":
        schedule |= {"buffer_groups": 16, "max_staleness": 1}
    recipe = prepare(tmp_path, steps=7, evaluate=EVALUATE, **KEYS, schedule=schedule)
    command = [sys.executable, "-m", "rstar_lab.rl.verl.train", recipe, "--profile", "laptop", "--runs-dir", tmp_path]
    command += ["--set", "verl.trainer.n_gpus_per_node=2", "--set", "engine.kv_cache_gb=0.25"]
    if engine == "slow":
        command += ["--set", SLOW]
    else:
        content = yaml.safe_load(recipe.read_text())
        del content["engine"]["mismatch_limit"]  # the default limit checks every token of the current weights
        recipe.write_text(yaml.safe_dump(content))
    log, run_dir = tmp_path / "verl.log", tmp_path / RUN
    newest = run_dir / "verl" / "latest_checkpointed_iteration.txt"

    def start():
        with log.open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

    with LocalRay(cpus=20, gpus=2, dashboard=False):
        train = start()
        try:
            while not (newest.exists() and newest.read_text() >= "3"):
                assert train.poll() is None, log.read_text(errors="replace")[-3000:]
                time.sleep(0.05)
            os.killpg(train.pid, signal.SIGKILL)
            train.wait()
            deadline = time.monotonic() + 60
            while engines_of(tmp_path):
                assert time.monotonic() < deadline, "the kill left an engine behind"
                time.sleep(0.5)
            step = int(newest.read_text())
            saved = json.loads((run_dir / "verl" / f"global_step_{step}" / "trainer.json").read_text())
            train = start()
            assert train.wait(1800) == 0, log.read_text(errors="replace")[-3000:]
        finally:
            if train.poll() is None:
                os.killpg(train.pid, signal.SIGKILL)
    lines = RunReader(run_dir).metrics()
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert all(line["groups"] == 4 and line["staleness_max"] <= schedule["max_staleness"] for line in lines)
    assert max(line["staleness_max"] for line in lines) == schedule["max_staleness"]
    assert max(line["stale_tokens"] or 0 for line in lines) > 0 and all(line["buffer_age_s"] >= 0 for line in lines)
    assert [line["step"] for line in lines if "eval/held/pass1" in line] == [3, 6]
    dropped = sum(line["dropped_groups"] for line in lines)
    assert dropped > 0 if when_stale == "drop" else dropped == 0
    rows = ds.dataset(run_dir / "trajectories", partitioning=None).to_table().to_pandas()
    assert rows["traj_id"].is_unique and rows["group_id"].nunique() == 28 + dropped and len(rows) == 4 * (28 + dropped)
    assert set(rows["attempt"]) == {1, 2}
    in_flight = dict(saved["carried"])
    assert in_flight and in_flight.items() <= dict(zip(rows["group_id"], rows["problem_id"], strict=True)).items()
    # A rollout that lasted for several updates names the weights of each part.
    texts = RunReader(run_dir).read("transcripts", ["messages", "response_ids"]).to_pylist()
    parts = [
        {version for version, _ in turn["policy_versions"]}
        for row in texts
        for turn in json.loads(row["messages"])
        if "policy_versions" in turn
    ]
    assert any(len(versions) > 1 for versions in parts), "no request went on under new weights"
