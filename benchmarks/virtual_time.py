"""An event loop whose clock jumps from event to event, for simulations with the asyncio code of real runs."""

import asyncio
import selectors
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class _JumpingSelector(selectors.SelectSelector):
    """A selector that does not wait: it advances the clock by the time that the event loop would sleep."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the simulation has no further event")
        self.now += max(timeout, 0.0)
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _JumpingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def run_in_virtual_time(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on an event loop whose clock jumps from event to event."""

    def run() -> Result:
        loop = _VirtualLoop()
        try:
            return loop.run_until_complete(work)
        finally:
            loop.close()

    with ThreadPoolExecutor(1) as thread:  # a notebook's own event loop runs in the caller's thread
        return thread.submit(run).result()
