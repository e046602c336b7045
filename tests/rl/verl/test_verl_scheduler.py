"""Tests that rollouts under verl follow `engine.scheduler`, with three inference servers as Ray actors."""

import asyncio
import os
import time
from pathlib import Path

import pytest
import ray

from benchmarks.verl_fleet import own_cluster, start_servers, with_scheduler
from benchmarks.verl_parity import prepare
from benchmarks.verl_scripted import ScriptedEngine
from rstar_lab.common.errors import UserError
from rstar_lab.rl.engine import Sampling
from rstar_lab.rl.models.model import load_tokenizer
from rstar_lab.rl.recipe import EngineSection

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TURNS, ROLLOUTS = 3, 24


class SlowEngine(ScriptedEngine):
    """The scripted engine with a delay, so that turns are in flight when a test kills the server."""

    async def generate(self, prompt_ids, sampling):
        await asyncio.sleep(0.2)
        return await super().generate(prompt_ids, sampling)


def serve_slowly(model, options):
    return SlowEngine(model)


def serve_without_kv_size(model, options):
    engine = ScriptedEngine(model)
    engine.kv_tokens = 0
    return engine


def vllm_options(folder):
    section = EngineSection(dtype="float32", kv_cache_gb=0.25, max_num_seqs=8).model_dump()
    return {"section": section, "max_tokens": 512, "seed": 0, "logs": str(folder)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a tiny model, with a Ray cluster for the servers."""
    folder = tmp_path_factory.mktemp("servers")
    prepare(folder)
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]  # for the engines of this file
    with own_cluster(PYTHONPATH=os.pathsep.join(path)):
        yield str(folder / "model")


@pytest.fixture(scope="module")
def slow_servers(model):
    return start_servers(f"{__name__}:serve_slowly", model, {}, 3)


def start(servers, policy):
    """Start a scheduler for the servers."""
    return with_scheduler(servers, policy, max_tokens=4096, max_response_tokens=512, max_running=8)


async def roll_out(client, tokenizer, number):
    """Run the turns of one rollout and return their token ids."""
    engine = client.slot(f"rollout-{number}", f"problem-{number // 4}")
    prompt, turns = tokenizer.encode(f"What is six times seven? ({number})", add_special_tokens=False), []
    try:
        for turn in range(TURNS):
            completion = await engine.generate(prompt, Sampling(max_tokens=40, seed=100 * number + turn))
            turns.append(completion.token_ids)
            prompt = prompt + completion.token_ids
            engine.on_turn("", turn == TURNS - 1)
    finally:
        engine.leave()
    return turns


async def roll_out_all(client, model, kill=None):
    """Run all rollouts; return their tokens and the most turns in flight per server. kill: server to kill in the meantime."""
    tokenizer = load_tokenizer(model)
    await client.scheduler.begin_step.remote(ROLLOUTS)
    tasks = [asyncio.create_task(roll_out(client, tokenizer, number)) for number in range(ROLLOUTS)]
    peak = dict.fromkeys(client.servers, 0)
    while not all(task.done() for task in tasks):
        for name, count in (await client.scheduler.stats.remote())["in_flight"].items():
            peak[name] = max(peak[name], count)
        if kill and peak[kill]:
            ray.kill(client.servers[kill])
            kill = None
        await asyncio.sleep(0.02)
    return [task.result() for task in tasks], peak


def final_stats(client):
    """Return the scheduler's stats after the last messages of the rollouts, which may still be on their way."""
    for _ in range(100):
        stats = ray.get(client.scheduler.stats.remote())
        if stats["open"] == 0 and not any(stats["in_flight"].values()):
            break
        time.sleep(0.1)
    return stats


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["scripted", "vllm"])
def test_rollouts_of_a_killed_server_continue_on_the_others(model, engine):
    vllm = engine == "vllm"
    factory = "rstar_lab.rl.verl.engine:CpuVllm" if vllm else f"{__name__}:serve_slowly"
    servers = start_servers(factory, model, vllm_options(Path(model).parent) if vllm else {}, 3)
    client = start(servers, "adaptive")
    complete, peak = asyncio.run(roll_out_all(client, model))
    assert min(peak.values()) > 0, "every server had turns"
    stats = final_stats(client)
    assert stats["open"] == 0 and not any(stats["in_flight"].values()) and stats["decisions"] == ROLLOUTS * TURNS
    with_failure, _ = asyncio.run(roll_out_all(client, model, kill="s1"))
    assert with_failure == complete, "the turns were generated again with the same seeds"
    stats = final_stats(client)
    assert stats["alive"] == 2 and stats["open"] == 0 and not any(stats["in_flight"].values())


STATIC = "benchmarks.barrier:Static"
OTHER_POLICIES = [pytest.param(name, marks=pytest.mark.soak) for name in (STATIC, "least-in-flight", "kv")]


@pytest.mark.parametrize("policy", ["adaptive", *OTHER_POLICIES])
def test_every_policy_places_all_turns(model, slow_servers, policy):
    client = start(slow_servers, policy)
    complete, peak = asyncio.run(roll_out_all(client, model))
    assert len(complete) == ROLLOUTS and max(peak.values()) <= ROLLOUTS
    assert ray.get(client.scheduler.stats.remote())["decisions"] == ROLLOUTS * TURNS
    if policy == STATIC:  # a busy machine starts some rollouts after the first dispatch, so shares can differ
        assert min(peak.values()) > 0 and sum(peak.values()) <= ROLLOUTS, "every rollout stays on its server"


@pytest.mark.soak
def test_a_policy_that_needs_the_kv_cache_size_is_refused_without_it(model):
    servers = start_servers(f"{__name__}:serve_without_kv_size", model, {}, 1)
    with pytest.raises(UserError, match=r"engine.scheduler: kv needs .* server s0 .* least-in-flight"):
        ray.get(start(servers, "kv").scheduler.begin_step.remote(1))
    ray.get(start(servers, "least-in-flight").scheduler.begin_step.remote(1))
