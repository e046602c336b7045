"""Property test of the sandbox's slots: random events, compared with a model after each."""

import asyncio

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rstar_lab.sandbox import scheduler
from rstar_lab.sandbox.scheduler import EXTRA_SHORT_CALLS, Scheduler, Slot, SlotState

PREEMPTED_PER_WORKER = 1  # 12 in the scheduler; a small limit is reached more often
HELD = (SlotState.RUNNING, SlotState.PREEMPTED, SlotState.WAITING)


class SlotMachine(RuleBasedStateMachine):
    """Calls queue, get a slot, wait, become long, end, or are cancelled in the queue.

    No slot is lost or given twice: the counts are those of the calls. No call is starved: slots are given in the order of
    arrival, and none is free while a call is queued.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.calls: dict[int, asyncio.Task[Slot]] = {}  # queued or with a slot, in the order of arrival
        self.arrived = 0
        self.started: list[int] = []
        self.preempted: list[int] = []  # calls that lost their slot to shorter calls and wait for it
        self.returned = 0  # calls that ran again after they waited, while all slots were taken

    @initialize(workers=st.integers(1, 3), max_waiting=st.integers(0, 3))
    def open(self, workers: int, max_waiting: int) -> None:
        self.scheduler = Scheduler(workers)
        self.scheduler._max_waiting = self.max_waiting = max_waiting

    def run_loop(self) -> None:
        """Let all tasks proceed."""

        async def turns() -> None:
            for _ in range(4):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        for number, call in self.calls.items():
            if number not in self.started and call.done() and not call.cancelled():
                self.started.append(number)
                call.result().on_preempt = lambda number=number: self.preempted.append(number)  # type: ignore[misc]
                call.result().on_resume = lambda number=number: self.preempted.remove(number)  # type: ignore[misc]

    def slots(self, *states: SlotState) -> dict[int, Slot]:
        found = {number: call.result() for number, call in self.calls.items() if call.done()}
        return {number: slot for number, slot in found.items() if slot.state in states}

    def pick(self, data: st.DataObject, *states: SlotState) -> tuple[int, Slot]:
        return data.draw(st.sampled_from(list(self.slots(*states).items())))

    @rule(calls=st.integers(1, 4))
    def arrive(self, calls: int) -> None:
        for _ in range(calls):
            self.calls[self.arrived] = self.loop.create_task(self.scheduler.take(timeout_s=3600))
            self.arrived += 1
        self.run_loop()

    @precondition(lambda self: self.slots(*HELD))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number, slot = self.pick(data, *HELD)
        self.scheduler.free(slot)
        self.scheduler.free(slot)  # a second time has no effect
        self.scheduler.mark_waiting(slot, True)
        assert slot.state is SlotState.FREE
        del self.calls[number]
        self.run_loop()

    @precondition(lambda self: self.slots(*HELD))
    @rule(data=st.data())
    def become_long(self, data: st.DataObject) -> None:
        self.scheduler.mark_long(self.pick(data, *HELD)[1])
        self.run_loop()

    @precondition(lambda self: self.slots(SlotState.RUNNING, SlotState.PREEMPTED))
    @rule(data=st.data())
    def stop_to_use_cpu(self, data: st.DataObject) -> None:
        self.scheduler.mark_waiting(self.pick(data, SlotState.RUNNING, SlotState.PREEMPTED)[1], True)
        self.run_loop()

    @precondition(lambda self: self.slots(SlotState.WAITING, SlotState.PREEMPTED))
    @rule(data=st.data())
    def use_cpu_again(self, data: st.DataObject) -> None:
        slot = self.pick(data, SlotState.WAITING, SlotState.PREEMPTED)[1]
        self.returned += slot.state is SlotState.WAITING
        self.scheduler.mark_waiting(slot, False)
        self.run_loop()

    @precondition(lambda self: any(not call.done() for call in self.calls.values()))
    @rule(data=st.data(), ends=st.booleans())
    def cancel(self, data: st.DataObject, ends: bool) -> None:
        """Cancel a queued call; in the same iteration of the event loop another call may end, so that both meet."""
        number = data.draw(st.sampled_from([number for number, call in self.calls.items() if not call.done()]))
        running = self.slots(*HELD)
        if ends and running:
            first = next(iter(running))
            self.scheduler.free(running[first])
            del self.calls[first]
        self.calls.pop(number).cancel()
        self.run_loop()

    @invariant()
    def counts_are_those_of_the_calls(self) -> None:
        if self.arrived:
            for state in HELD:
                assert self.scheduler.count(state) == len(self.slots(state))
            assert self.scheduler.depth == sum(not call.done() for call in self.calls.values())

    @invariant()
    def no_slot_is_free_while_calls_are_queued(self) -> None:
        if self.arrived and self.scheduler.depth:
            assert len(self.slots(SlotState.RUNNING)) >= self.scheduler.workers

    @precondition(lambda self: self.slots(SlotState.PREEMPTED))
    @rule()
    def no_call_arrives_for_a_while(self) -> None:
        assert self.scheduler._timer is not None
        self.scheduler._timer.cancel()
        self.scheduler._arrived = self.loop.time() - scheduler.QUIET_S
        self.scheduler._resume_preempted_calls()
        if not self.scheduler.depth and any(not slot.waiting for slot in self.slots(SlotState.PREEMPTED).values()):
            assert len(self.slots(SlotState.RUNNING)) >= self.scheduler.workers

    @invariant()
    def limits_hold(self) -> None:
        if self.arrived:
            assert len(self.slots(SlotState.RUNNING)) <= self.scheduler.workers + EXTRA_SHORT_CALLS + self.returned
            assert len(self.slots(SlotState.WAITING)) <= self.max_waiting
            assert len(self.slots(SlotState.PREEMPTED)) <= PREEMPTED_PER_WORKER * self.scheduler.workers
            held = [number for number in self.preempted if number in self.calls]
            assert sorted(held) == sorted(self.slots(SlotState.PREEMPTED)), (
                "a call is told each time that its state changes"
            )

    @invariant()
    def slots_are_given_in_the_order_of_arrival(self) -> None:
        assert self.started == sorted(self.started)

    def teardown(self) -> None:
        for slot in self.slots(*HELD).values() if self.arrived else ():
            self.scheduler.free(slot)
        for _ in range(self.arrived):
            self.run_loop()
            for slot in self.slots(*HELD).values():
                self.scheduler.free(slot)
        assert all(call.done() for call in self.calls.values()), "every call gets a slot"
        self.loop.close()


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(scheduler, "PREEMPTED_PER_WORKER", PREEMPTED_PER_WORKER)
    monkeypatch.setattr(scheduler, "ENOUGH", 3)


def test_no_slot_is_lost_and_no_call_is_starved():
    run_state_machine_as_test(SlotMachine)


async def four_calls(short_calls: int) -> tuple[Scheduler, list[asyncio.Task[Slot]]]:
    """Start four calls on two workers after `short_calls` short ones."""
    queue = Scheduler(2)
    for _ in range(short_calls):
        queue.free(await queue.take(1.0))
    calls = [asyncio.create_task(queue.take(3600)) for _ in range(4)]
    await asyncio.sleep(0)
    return queue, calls


@pytest.mark.parametrize(("short_calls", "running"), [(3, 3), (2, 2)])
async def test_one_more_short_call_runs_while_long_ones_are_rare(short_calls, running):
    queue, calls = await four_calls(short_calls)
    assert queue.count(SlotState.RUNNING) == running
    for call in calls:
        call.cancel()


async def test_no_extra_call_runs_beside_a_long_one():
    queue, calls = await four_calls(64)
    queue.mark_long(calls[0].result())
    queue.mark_long(calls[1].result())
    await asyncio.sleep(0)
    assert [call.done() for call in calls] == [True] * 4, "both long calls are preempted"
    queue.mark_long(calls[2].result())
    queue.mark_long(calls[3].result())
    calls += [asyncio.create_task(queue.take(3600)) for _ in range(3)]
    await asyncio.sleep(0)
    assert queue.count(SlotState.PREEMPTED) == 2, "the limit"
    assert queue.count(SlotState.RUNNING) == 2
    for call in calls:
        call.cancel()


async def test_a_preempted_call_gets_its_slot_back_when_no_call_arrives(monkeypatch):
    monkeypatch.setattr(scheduler, "QUIET_S", 0.05)
    queue = Scheduler(1)
    for _ in range(64):
        queue.free(await queue.take(1.0))
    events: list[str] = []
    long, short = await queue.take(1.0), asyncio.create_task(queue.take(3600))
    long.on_preempt, long.on_resume = lambda: events.append("preempted"), lambda: events.append("resumed")
    extra = asyncio.create_task(queue.take(3600))
    await asyncio.sleep(0)
    queue.mark_long(long)
    await asyncio.sleep(0)
    assert events == ["preempted"] and short.done() and extra.done()
    queue.free(extra.result())
    await asyncio.sleep(0.2)
    assert events == ["preempted"], "the other short call still has the slot"
    queue.free(short.result())
    assert events == ["preempted"], "the next call may arrive at once"
    async with asyncio.timeout(10):
        while events == ["preempted"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert events == ["preempted", "resumed"] and long.state is SlotState.RUNNING
    waiting = [asyncio.create_task(queue.take(3600)) for _ in range(2)]
    await asyncio.sleep(0)
    assert events == ["preempted", "resumed", "preempted"] and waiting[0].done()
    for call in waiting:
        call.cancel()
