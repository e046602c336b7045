"""Backend that runs code in a LocalSandbox and verifies answers in processes of this machine."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from rstar_lab.outcomes import Outcome
from rstar_lab.sandbox.call import CallResult
from rstar_lab.sandbox.local import LocalSandbox
from rstar_lab.sandbox.verification import Verification
from rstar_lab.sandbox.wire import SessionEnd, Work
from rstar_lab.verify import verify, warm_up


class LocalBackend:
    """A LocalSandbox and a thread pool for verification."""

    def __init__(self, sandbox: LocalSandbox) -> None:
        self.sandbox = sandbox
        self.workers = sandbox.workers
        # `verify` limits the time of each answer. More threads than cores, so that slow answers do not block fast ones.
        self.threads = ThreadPoolExecutor(max(4, 2 * self.workers), thread_name_prefix="verify")

    async def start(self) -> "LocalBackend":
        await self.sandbox.start()
        self.threads.submit(warm_up)
        return self

    async def aclose(self) -> None:
        await self.sandbox.aclose()
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Work) -> CallResult:
        if isinstance(work, Verification):
            return await self.verify(work)
        if isinstance(work, SessionEnd):
            await self.sandbox.close_session(work.session)
            return CallResult(Outcome.OK, "", "", None, 0.0)
        return await self.sandbox.run(
            work.code,
            work.stdin,
            seed=work.seed,
            timeout_s=work.timeout_s,
            memory_mb=work.memory_mb,
            session=work.session,
        )

    async def verify(self, work: Verification) -> CallResult:
        requested = time.monotonic()

        def timed() -> tuple[bool, float, float]:
            started = time.monotonic()
            right = verify(work.response_text, work.answer)
            return right, started - requested, time.monotonic() - started

        right, queue_s, duration_s = await asyncio.get_running_loop().run_in_executor(self.threads, timed)
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
    def prefetch_limit(self) -> int:
        """Calls that a worker takes from Redis at once: enough to keep all cores busy, few enough to share the load."""
        return 4 * self.workers + 8
