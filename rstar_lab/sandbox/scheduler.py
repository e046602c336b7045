"""Assigns a fixed number of slots to calls. Long calls are preempted by short ones; calls that wait release their slot."""

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum

from rstar_lab.sandbox.runtime.pressure import max_waiting_calls

# Long calls are rare if they are at most this share of the last RECENT calls. Before ENOUGH calls have ended or become long,
# the share is unknown and counts as too large.
RARE = 0.1
RECENT = 64
ENOUGH = 16
# Calls that can be preempted at the same time, per worker.
PREEMPTED_PER_WORKER = 12
# Calls that run in addition to one per worker while all of them are short. They use the CPU time between the end of a program
# and the start of the next one.
EXTRA_SHORT_CALLS = 1
# A burst of short calls counts as over when no call has arrived for this many seconds. Preempted calls then get free slots back.
QUIET_S = 0.5


class SlotState(Enum):
    """State of a call. Only RUNNING occupies one of the worker slots.

    PREEMPTED runs with low priority. WAITING sleeps or is blocked. FREE has ended.
    """

    RUNNING = "running"
    PREEMPTED = "preempted"
    WAITING = "waiting"
    FREE = "free"


class Slot:
    """The permission of one call to run. on_preempt: called when a shorter call takes the slot; on_resume: when it gets it back."""

    def __init__(self) -> None:
        self.state = SlotState.RUNNING
        self.long = self.waiting = False
        self.on_preempt: Callable[[], None] = lambda: None
        self.on_resume: Callable[[], None] = lambda: None


class Scheduler:
    """A queue for `workers` slots, first come first served. There is one more slot while only short calls run and long ones are rare.

    Transitions: RUNNING <-> PREEMPTED (a short call takes the slot; no call needs it any more), RUNNING <-> WAITING (the call
    stops or starts to use CPU time), any state -> FREE. A call that returns from WAITING runs at once, so there may be more
    running calls than slots.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._max_waiting = max_waiting_calls()
        self._counts = dict.fromkeys(SlotState, 0)
        self._queue: deque[asyncio.Future[Slot]] = deque()
        self._long: dict[Slot, None] = {}
        self._preempted: dict[Slot, None] = {}
        self._recent: deque[bool] = deque(maxlen=RECENT)
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the calls
        self._arrived = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def depth(self) -> int:
        """Calls in the queue."""
        return sum(not future.done() for future in self._queue)

    def count(self, state: SlotState) -> int:
        """Return the number of calls in a state."""
        return self._counts[state]

    async def take(self, timeout_s: float) -> Slot:
        """Wait for a slot. Raises TimeoutError after `timeout_s` seconds."""
        self._loop = asyncio.get_running_loop()
        self._arrived = self._loop.time()
        queued: asyncio.Future[Slot] = self._loop.create_future()
        self._queue.append(queued)
        self._start_next()
        if not queued.done():
            self._preempt_long_calls()
        try:
            async with asyncio.timeout(timeout_s):
                return await queued
        except BaseException:
            if queued.done() and not queued.cancelled() and queued.exception() is None:
                self.free(queued.result())
            raise

    def free(self, slot: Slot) -> None:
        """Return a slot at the end of its call."""
        if slot.long:
            self._long.pop(slot, None)
            self._preempted.pop(slot, None)
        else:
            self._recent.append(False)
        self._move(slot, SlotState.FREE)

    def mark_long(self, slot: Slot) -> None:
        """Record that a call has used so much CPU time that shorter ones may preempt it."""
        if not slot.long and slot.state is not SlotState.FREE:
            slot.long = True
            self._recent.append(True)
            self._long[slot] = None
            self._preempt_long_calls()

    def mark_waiting(self, slot: Slot, waiting: bool) -> None:
        """Record that a call has stopped (or started again) to use CPU time."""
        slot.waiting = waiting
        if waiting and slot.state is SlotState.RUNNING and self._counts[SlotState.WAITING] < self._max_waiting:
            self._move(slot, SlotState.WAITING)
        elif not waiting and slot.state is SlotState.WAITING:
            self._move(slot, SlotState.RUNNING)
            self._preempt_long_calls()

    def close(self, error: Exception) -> None:
        """Raise `error` in all queued calls."""
        for queued in self._queue:
            if not queued.done():
                queued.set_exception(error)

    def _move(self, slot: Slot, state: SlotState) -> None:
        if slot.state is not SlotState.FREE:
            self._counts[slot.state] -= 1
            slot.state = state
            self._counts[state] += state is not SlotState.FREE
        self._start_next()

    def _preempt_long_calls(self) -> None:
        """Preempt long calls while calls are queued and long ones are rare, or while more calls run than there are slots.

        While at least one call is preempted, other long calls are preempted even if the queue is empty.
        """
        rare = self._long_calls_are_rare()
        limit = PREEMPTED_PER_WORKER * self.workers
        for slot in [slot for slot in self._long if slot.state is SlotState.RUNNING]:
            preempted = self._counts[SlotState.PREEMPTED]
            crowded = self._counts[SlotState.RUNNING] > self.workers
            if preempted >= limit or not (crowded or (rare and (self.depth or preempted))):
                return
            del self._long[slot]
            self._preempted[slot] = None
            slot.on_preempt()
            self._move(slot, SlotState.PREEMPTED)
            self._timer = self._timer or self._resume_later()

    def _long_calls_are_rare(self) -> bool:
        """Return whether short calls may take the slots of long ones."""
        return len(self._recent) >= ENOUGH and sum(self._recent) <= RARE * len(self._recent) + 1

    def _slots(self) -> int:
        """Return the number of calls that may run now."""
        only_short = not any(slot.state is SlotState.RUNNING for slot in self._long)
        return self.workers + EXTRA_SHORT_CALLS * (only_short and self._long_calls_are_rare())

    def _start_next(self) -> None:
        while self._queue and self._counts[SlotState.RUNNING] < self._slots():
            queued = self._queue.popleft()
            if not queued.done():
                self._counts[SlotState.RUNNING] += 1
                queued.set_result(Slot())

    def _resume_preempted_calls(self) -> None:
        """If no call has arrived for a while, give free slots to preempted calls that use CPU time, in the order of preemption."""
        assert self._loop is not None
        quiet = not self.depth and self._loop.time() - self._arrived >= QUIET_S
        for slot in [slot for slot in self._preempted if quiet and not slot.waiting]:
            if self._counts[SlotState.RUNNING] >= self.workers:
                break
            del self._preempted[slot]
            self._long[slot] = None
            self._move(slot, SlotState.RUNNING)
            slot.on_resume()
        self._timer = self._resume_later() if self._preempted else None

    def _resume_later(self) -> asyncio.TimerHandle:
        assert self._loop is not None
        return self._loop.call_later(QUIET_S, self._resume_preempted_calls)
