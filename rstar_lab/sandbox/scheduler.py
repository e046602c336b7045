"""Who may run now: a queue for a fixed number of slots, in which long calls make room for short ones."""

import asyncio
from collections import deque
from collections.abc import Callable

# Only where long calls are rare does making room for others help: at most this share of the last calls.
RARE = 0.1
RECENT = 64
ENOUGH = 16
ASIDE_PER_WORKER = 12


class Slot:
    """A call's hold on a slot."""

    def __init__(self) -> None:
        self.long = False
        self.aside = False
        self.on_preempt: Callable[[], None] = lambda: None


class Scheduler:
    def __init__(self, workers: int, make_room: bool) -> None:
        self.workers = workers
        self.make_room = make_room
        self.running = 0
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self._long: dict[Slot, None] = {}
        self._aside = 0
        self._recent: deque[bool] = deque(maxlen=RECENT)

    @property
    def depth(self) -> int:
        """Calls that wait."""
        return sum(not future.done() for future in self._waiting)

    async def take(self, timeout_s: float) -> Slot:
        """Raises TimeoutError."""
        if self.running < self.workers:
            self.running += 1
            return Slot()
        waiting: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._preempt_long_calls()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting
        except BaseException:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.free(waiting.result())
            raise

    def free(self, slot: Slot) -> None:
        if slot.long:
            self._long.pop(slot, None)
        else:
            self._recent.append(False)
        if slot.aside:
            self._aside -= 1
        else:
            self._start_next()

    def mark_long(self, slot: Slot) -> None:
        """This call has run longer than most do."""
        if not slot.long:
            slot.long = True
            self._recent.append(True)
            self._long[slot] = None
            self._preempt_long_calls()

    def close(self, error: Exception) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)

    def _preempt_long_calls(self) -> None:
        """Move long calls aside, where calls wait and long ones are rare; beside those that had to, the last ones too."""
        rare = self.make_room and len(self._recent) >= ENOUGH and sum(self._recent) <= RARE * len(self._recent) + 1
        while rare and self._long and (self.depth or self._aside) and self._aside < ASIDE_PER_WORKER * self.workers:
            slot = next(iter(self._long))
            del self._long[slot]
            slot.aside = True
            self._aside += 1
            slot.on_preempt()
            self._start_next()

    def _start_next(self) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(Slot())
                return
        self.running -= 1
