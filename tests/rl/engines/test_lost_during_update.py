"""Tests of servers that fail while new weights are sent to them."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from helpers.scripted_server import UPDATE, ScriptedServer
from helpers.tiny_models import make_model

from rstar_lab.common.errors import UserError
from rstar_lab.rl.engine import EngineError, Sampling
from rstar_lab.rl.engines import group as group_module
from rstar_lab.rl.engines.group import EngineGroup
from rstar_lab.rl.engines.vllm import VllmEngine
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.rollout.context import RolloutTask


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def two_servers(folder, monkeypatch, **options):
    """Yield (group, servers): two scripted servers and their engines. Their log-probs are not compared with the model's."""

    async def assert_parity(engine, *_):
        await engine.generate([1], Sampling(1))

    monkeypatch.setattr(group_module, "assert_parity", assert_parity)
    servers = [ScriptedServer(), ScriptedServer()]
    for server in servers:
        await server.start()
    engines = [await server.engine(**{"stall_s": 0.4} | options) for server in servers]
    for engine in engines:
        engine.group = engines
    group = EngineGroup(engines, folder, 8)
    try:
        yield group, servers
    finally:
        await group.aclose()
        for server in servers:
            server.die()


async def dispatch(group, count=6):
    """Run rollouts of one turn and return the names of the engines that generated them."""
    tasks = [
        RolloutTask(Problem(problem_id=f"p{i}", question="q", answer="a"), f"t{i}", f"p{i}", 0, i) for i in range(count)
    ]
    slots = group.slots(tasks, "async")
    done = await asyncio.gather(*(slots(i, task).generate([5, i], Sampling(4, seed=i)) for i, task in enumerate(tasks)))
    return {completion.engine for completion in done}


async def wait_until(done, seconds=5.0):
    async with asyncio.timeout(seconds):
        while not done():  # noqa: ASYNC110 - the attributes of a server have no event
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("path", UPDATE)
async def test_a_server_that_dies_during_an_update_is_lost(tmp_path, model, monkeypatch, path):
    async with two_servers(tmp_path, monkeypatch) as (group, (dying, working)):
        first, second = group.engines
        await group.load(model, 1)
        assert await dispatch(group) == {first.name, second.name}
        dying.dies_at = path
        await asyncio.wait_for(group.load(model, 2), 10)
        assert first.lost and not second.lost and working.version == 2 and not working.paused
        assert await dispatch(group) == {second.name}
        dying.dies_at = ""
        await dying.start()
        await wait_until(lambda: not first.lost)
        assert dying.version == 2 and not dying.paused
        assert await dispatch(group) == {first.name, second.name}


async def test_a_server_that_does_not_accept_weights_after_a_restart_is_named(tmp_path, model, monkeypatch, caplog):
    async with two_servers(tmp_path, monkeypatch) as (group, (dying, _)):
        first, second = group.engines
        dying.dies_at = "/pause"
        await group.load(model, 1)
        dying.dies_at, dying.status = "", {"/weight_version": 404}
        await dying.start()
        await wait_until(lambda: "--updatable" in caplog.text)
        await asyncio.sleep(0.5)  # several more checks
        assert first.lost and await dispatch(group) == {second.name}
        lines = [record.getMessage() for record in caplog.records if record.name == "rstar_lab.rl.engines.server"]
        assert len(lines) == 2, "one line when it was lost, one about the restart"
        assert lines[0].startswith(f"{first.name} is lost: a weight update failed: /pause")
        assert lines[1] == (
            f"{first.name} is still lost: {first.name} does not accept new weights: "
            "start it with `rstar-lab serve MODEL --updatable`"
        )
        dying.status = {}
        await wait_until(lambda: not first.lost)
        assert caplog.records[-1].getMessage() == f"{first.name} is used again"


async def test_a_server_that_recovers_during_an_update_does_not_end_it(tmp_path, model, monkeypatch):
    async with two_servers(tmp_path, monkeypatch) as (group, (dying, slow)):
        first, _ = group.engines
        dying.dies_at, slow.hangs_at = "/pause", "/collective_rpc"
        update = asyncio.create_task(group.load(model, 1))
        await wait_until(lambda: first.lost)
        dying.dies_at = ""
        await dying.start()
        await wait_until(lambda: not first.lost)
        await asyncio.wait_for(update, 10)
        assert dying.version == 1


async def test_an_update_waits_for_a_server_if_all_are_lost(tmp_path, model, monkeypatch):
    async with two_servers(tmp_path, monkeypatch) as (group, servers):
        for server in servers:
            server.dies_at = "/collective_rpc"
        update = asyncio.create_task(group.load(model, 1))
        await wait_until(lambda: all(engine.lost for engine in group.engines))
        servers[0].dies_at = ""
        await servers[0].start()
        await asyncio.wait_for(update, 10)
        assert servers[0].version == 1
        assert await dispatch(group) == {group.engines[0].name}


@pytest.mark.parametrize("path", ["/collective_rpc", "/v1/completions"])  # the second: during the log-prob check
async def test_no_server_left_is_an_error_after_a_time(tmp_path, model, monkeypatch, path):
    monkeypatch.setattr("rstar_lab.rl.engines.server.ServerEngine.PATIENCE_S", 2.0)
    async with two_servers(tmp_path, monkeypatch) as (group, servers):
        for server in servers:
            server.dies_at = path
        started = time.monotonic()
        with pytest.raises(UserError, match=r"no engine is left for the weights of .* version 3; .* restart") as error:
            await group.load(model, 3)
        assert 2.0 <= time.monotonic() - started < 3.9  # waits once
        assert all(f"\n{engine.name}" in str(error.value) for engine in group.engines)


async def test_an_error_of_a_healthy_server_ends_the_update(tmp_path, model, monkeypatch):
    async with two_servers(tmp_path, monkeypatch) as (group, (failing, _)):
        failing.status["/collective_rpc"] = 500
        with pytest.raises(EngineError, match="/collective_rpc: 500"):
            await group.load(model, 1)
        assert not group.engines[0].lost and not failing.paused


async def test_a_local_engine_that_cannot_be_restarted_is_left_out(tmp_path, model, monkeypatch):
    async with two_servers(tmp_path, monkeypatch) as (group, servers):
        local = VllmEngine()
        local._fail(EngineError("vllm-0 died too often"))
        group.engines = [local, *group.engines]
        await group.load(model, 1)
        assert [server.version for server in servers] == [1, 1]
        slot = group.slots([RolloutTask(Problem(problem_id="p", question="q", answer="a"), "t", "p", 0, 0)], "lockstep")
        assert (await slot(0, None).generate([5], Sampling(4))).engine == servers[0].url
