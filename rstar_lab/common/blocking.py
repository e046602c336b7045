"""An event loop in a thread, whose coroutines are called from blocking code."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any


class LoopThread:
    """An event loop in a daemon thread. Its methods can be called from any thread."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def call(self, work: Coroutine[Any, Any, Any], *, completes: bool = False, timeout_s: float | None = None) -> Any:
        """Return the result of a coroutine. Ctrl-C cancels it and waits for its end; if it `completes`, Ctrl-C only waits.

        timeout_s: maximum time to wait. Raises TimeoutError.
        """
        # Cancelling the future of `run_coroutine_threadsafe` would not wait for the end of the coroutine.
        task: list[asyncio.Task[Any]] = []

        async def run() -> Any:
            task.append(asyncio.create_task(work))
            return await asyncio.wait_for(task[0], timeout_s)

        def cancel() -> None:
            if task:
                task[0].cancel()
            else:
                self._loop.call_soon(cancel)

        future: Future[Any] = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            if not completes:
                self._loop.call_soon_threadsafe(cancel)
            with suppress(CancelledError, asyncio.CancelledError):
                future.result()
            raise

    def stop(self) -> None:
        """End the loop, without waiting for its coroutines."""
        self._loop.call_soon_threadsafe(self._loop.stop)
