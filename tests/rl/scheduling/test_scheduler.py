"""Tests of the scheduler service with scripted servers."""

import asyncio
from dataclasses import replace

import pytest

from rstar_lab.rl.engine import EngineError
from rstar_lab.rl.scheduling.policies import POLICIES
from rstar_lab.rl.scheduling.scheduler import Scheduler, ServerReport, poll_metrics

IDLE = ServerReport(preemptions=0)


def make_scheduler(policy: str = "adaptive", servers: int = 2, kv_tokens: int = 1000, **options: float) -> Scheduler:
    scheduler = Scheduler(policy, max_tokens=400, **options)
    for number in range(servers):
        scheduler.add_server(f"s{number}", kv_tokens)
    return scheduler


async def run_rollout(
    scheduler: Scheduler, name: str, *, turns: int = 2, failing: frozenset[str] = frozenset()
) -> list[str]:
    """Drive one scripted rollout. Returns the server of each turn."""
    servers = []
    for turn in range(turns):
        while (server := await scheduler.admit(name, name.split("-")[0], 50 + 20 * turn)) in failing:
            scheduler.server_failed(server)
        await asyncio.sleep(0.001)
        servers.append(server)
        scheduler.finish(name, 20, done=turn == turns - 1)
    return servers


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_finishes_all_rollouts_and_leaves_nothing_open(policy):
    scheduler = make_scheduler(policy)
    for _ in range(2):
        scheduler.begin_step(24)
        served = await asyncio.gather(*(run_rollout(scheduler, f"p{i % 6}-{i}") for i in range(24)))
        assert {server for servers in served for server in servers} == {"s0", "s1"}
        assert scheduler.stats() | {"open": 0, "in_flight": {"s0": 0, "s1": 0}} == scheduler.stats()


@pytest.mark.parametrize("policy", POLICIES)
async def test_rollouts_move_to_other_servers_when_a_server_fails(policy):
    scheduler = make_scheduler(policy, servers=3)
    scheduler.begin_step(12)
    served = await asyncio.gather(*(run_rollout(scheduler, f"p-{i}", failing=frozenset({"s1"})) for i in range(12)))
    assert {server for servers in served for server in servers} == {"s0", "s2"}
    assert (
        scheduler.stats() | {"open": 0, "in_flight": dict.fromkeys(("s0", "s1", "s2"), 0), "alive": 2}
        == scheduler.stats()
    )


async def test_admission_waits_until_the_kv_cache_has_room():
    scheduler = make_scheduler("kv", servers=1, kv_tokens=800)  # two rollouts of at most 400 tokens
    admits = [asyncio.create_task(scheduler.admit(f"p-{i}", "p", 50)) for i in range(3)]
    await asyncio.sleep(0.01)
    assert [admit.done() for admit in admits] == [True, True, False]
    scheduler.finish("p-0", 10, done=True)
    assert await asyncio.wait_for(admits[2], 1) == "s0"


async def test_preemptions_lower_the_share_of_the_kv_cache_until_they_stop():
    scheduler = make_scheduler("kv", servers=1, kv_tokens=800)  # two rollouts of at most 400 tokens
    scheduler.report("s0", ServerReport(preemptions=3))
    first, second = (asyncio.create_task(scheduler.admit(f"p-{i}", "p", 50)) for i in range(2))
    await asyncio.sleep(0.01)
    assert (first.done(), second.done()) == (True, False), "90% of the cache holds one rollout"
    quiet = ServerReport(preemptions=3)
    for reports in range(1, 13):  # the share rises by 0.01 per report without a further preemption
        scheduler.report("s0", quiet)
        await asyncio.sleep(0.001)
        assert not (second.done() and reports < 10)
    assert second.done()
    scheduler.server_failed("s0")
    scheduler.server_restarted("s0")
    scheduler.report("s0", ServerReport(preemptions=1))  # a server that was started again counts from 0
    assert scheduler._states[0].kv_tokens == 720
    for _ in range(30):
        scheduler.report("s0", replace(quiet, preemptions=scheduler._servers[0].preemptions + 1))
    assert scheduler._states[0].kv_tokens == 400, "at least half of the cache stays in use"


async def test_cancelled_admit_abandons_the_rollout():
    scheduler = make_scheduler("kv", servers=1, kv_tokens=400)
    await scheduler.admit("p-0", "p", 50)
    waiting = asyncio.create_task(scheduler.admit("p-1", "p", 50))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    scheduler.finish("p-0", 10, done=True)
    assert await asyncio.wait_for(scheduler.admit("p-2", "p", 50), 1) == "s0"
    assert scheduler.stats()["open"] == 1


async def test_admit_fails_when_no_server_returns_in_time():
    scheduler = make_scheduler(patience_s=0.05)
    for name in ("s0", "s1"):
        scheduler.server_failed(name)
    with pytest.raises(EngineError, match="no inference server"):
        await asyncio.wait_for(scheduler.admit("p-0", "p", 50), 2)


async def test_first_dispatch_waits_for_all_rollouts_for_a_limited_time(monkeypatch):
    scheduler = make_scheduler("benchmarks.barrier:Static")
    monkeypatch.setattr(scheduler, "HOLD_S", 0.2)
    scheduler.begin_step(4)
    first = [asyncio.create_task(scheduler.admit(f"p-{i}", "p", 50)) for i in range(2)]
    await asyncio.sleep(0.05)
    assert not any(admit.done() for admit in first)
    rest = [scheduler.admit(f"p-{i}", "p", 50) for i in range(2, 4)]
    assert await asyncio.gather(*first, *rest) == ["s0", "s0", "s1", "s1"]
    for i in range(4):
        scheduler.finish(f"p-{i}", 1, done=True)
    scheduler.begin_step(4)
    assert await asyncio.wait_for(scheduler.admit("q-0", "q", 50), 2) in ("s0", "s1")


async def test_a_server_without_metrics_is_not_used_until_they_return():
    scheduler = make_scheduler(servers=2)
    answers = True

    async def read() -> ServerReport:
        if not answers:
            raise OSError("connection refused")
        return IDLE

    async def read_idle() -> ServerReport:
        return IDLE

    poll = asyncio.create_task(poll_metrics(scheduler, {"s0": read, "s1": read_idle}, every_s=0.01))
    answers = False
    await asyncio.sleep(0.3)
    assert (scheduler.is_alive("s0"), scheduler.is_alive("s1")) == (False, True)
    answers = True
    await asyncio.sleep(0.3)
    assert scheduler.is_alive("s0")
    poll.cancel()
    with pytest.raises(asyncio.CancelledError):
        await poll


async def test_polling_ends_when_it_is_cancelled_while_a_read_ends():
    scheduler, gate = make_scheduler(servers=1), asyncio.Event()

    async def read() -> ServerReport:
        await gate.wait()
        return IDLE

    poll = asyncio.create_task(poll_metrics(scheduler, {"s0": read}, every_s=0.01))
    await asyncio.sleep(0.01)
    gate.set()  # the read and the cancellation arrive in the same iteration of the event loop
    poll.cancel()
    done, _ = await asyncio.wait({poll}, timeout=5)
    assert done
