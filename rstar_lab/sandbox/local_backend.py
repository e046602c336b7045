"""Backend that runs code in a LocalSandbox and verifies answers in processes of this machine."""

import asyncio
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from rstar_lab.outcomes import Outcome
from rstar_lab.sandbox.call import CallResult
from rstar_lab.sandbox.local import LocalSandbox
from rstar_lab.sandbox.streaming import OnOutput
from rstar_lab.sandbox.verification import Verification
from rstar_lab.sandbox.wire import SessionEnd, SessionFork, Work
from rstar_lab.verify import Undecided, verify, warm_up

# Limit in CPU seconds of the first attempt to verify an answer; most answers need about 0.01. An answer that needs more is
# verified again without this limit, in other threads, so that it does not delay short ones.
QUICK_CPU_S = 0.1


class LocalBackend:
    """Runs code in a LocalSandbox and verifies answers in threads that wait for killable processes."""

    def __init__(self, sandbox: LocalSandbox) -> None:
        self.sandbox = sandbox
        self.workers = sandbox.workers
        # `slow` is for answers that have used up QUICK_CPU_S, so that they do not delay ordinary ones.
        self.quick = ThreadPoolExecutor(max(4, 2 * self.workers), thread_name_prefix="verify")
        self.slow = ThreadPoolExecutor(max(2, self.workers), thread_name_prefix="verify-slow")

    async def start(self) -> "LocalBackend":
        await self.sandbox.start()
        self.quick.submit(warm_up)
        return self

    async def aclose(self) -> None:
        await self.sandbox.aclose()
        for threads in (self.quick, self.slow):
            threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Work, on_output: OnOutput | None = None) -> CallResult:
        if isinstance(work, Verification):
            return await self.verify(work)
        if isinstance(work, SessionEnd):
            await self.sandbox.close_session(work.session)
            return CallResult(Outcome.OK, "", "", None, 0.0)
        if isinstance(work, SessionFork):
            names = await self.sandbox.fork(work.session, work.n)
            return CallResult(Outcome.OK, "", "", json.dumps(names), 0.0)
        return await self.sandbox.run_call(work, on_output)

    async def verify(self, work: Verification) -> CallResult:
        requested = time.monotonic()

        def timed(slice_s: float | None) -> tuple[bool, float, float]:
            started = time.monotonic()
            right = verify(work.response_text, work.answer, slice_s=slice_s)
            return right, started - requested, time.monotonic() - started

        loop = asyncio.get_running_loop()
        try:
            right, queue_s, duration_s = await loop.run_in_executor(self.quick, timed, QUICK_CPU_S)
        except Undecided:
            try:
                right, queue_s, duration_s = await loop.run_in_executor(self.slow, timed, None)
            except Undecided as undecided:
                return CallResult(Outcome.SANDBOX_ERROR, "", str(undecided), None, time.monotonic() - requested)
        return CallResult(Outcome.OK, "", "", str(right), duration_s, queue_s)

    @property
    def queued(self) -> int:
        return self.sandbox.queue_depth

    @property
    def capacity(self) -> int:
        return self.workers

    @property
    def zygotes(self) -> int:
        return self.sandbox.zygotes

    @property
    def sessions(self) -> int:
        return self.sandbox.sessions

    @property
    def events(self) -> Mapping[str, int]:
        return self.sandbox.events

    @property
    def prefetch_limit(self) -> int:
        """Calls that a worker takes from Redis at once: enough to keep all cores busy, few enough to share the load."""
        return 4 * self.workers + 8
