"""LocalSandbox: runs calls in processes on this machine, without a server or Redis."""

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox.call import Call, CallResult, ForkError, OnOutput, Output, failure, log_event, stream_output
from rstar_lab.sandbox.call_request import Answer, Job, make_job, make_request, tier_of
from rstar_lab.sandbox.check import POOLS, Pool, check_isolation, check_layers
from rstar_lab.sandbox.interface import Sandbox
from rstar_lab.sandbox.limits import Limits
from rstar_lab.sandbox.runtime import protocol
from rstar_lab.sandbox.runtime.monitor import STARVED_TIMEOUTS
from rstar_lab.sandbox.scheduler import Scheduler, Slot
from rstar_lab.sandbox.sessions import ANSWER_S, ENDED, IDLE_ENDED, Forker, Session, Sessions
from rstar_lab.sandbox.supervisor_pool import (
    SessionRefused,
    SupervisorConnection,
    SupervisorDied,
    SupervisorPool,
    SupervisorUnresponsive,
    View,
    check_readable,
)

ATTEMPTS = 4
RETRY_PAUSE_S = 0.05
log = logging.getLogger(__name__)


class LocalSandbox(Sandbox):
    """Runs model-written Python in isolated processes of this machine.

        async with LocalSandbox() as sandbox:
            result = await sandbox.run("print(6 * 7)")

    workers: calls that can use CPU time at the same time (default: one per core that this process may use), plus one while all
    of them are short; more calls wait in a queue. strict: raise LayersMissing if an isolation layer is missing, instead of
    logging a warning. readable: files and folders of this machine that programs can read. isolation: `namespaces`, or `gvisor`,
    which runs every call and session in its own container with gVisor's kernel (requires `runsc`). preload: modules that are
    imported once, for all programs whose code names them.
    All methods must be called from one event loop. docs/sandbox-boundary.md describes the isolation and its limits.
    """

    def __init__(
        self,
        limits: Limits = Limits(),
        workers: int | None = None,
        *,
        strict: bool = False,
        readable: Sequence[str | Path] = (),
        isolation: str = "namespaces",
        preload: Sequence[str] = (),
    ) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers: {workers!r} must be at least 1")
        self.limits = limits
        self.workers = workers or len(os.sched_getaffinity(0))
        self.strict = strict
        self.isolation = check_isolation(isolation)
        self._view = View([check_readable(path) for path in readable], list(preload))
        self.outcomes: Counter[Outcome] = Counter()
        self.events: Counter[str] = Counter()  # failures of processes of the sandbox
        self._scheduler = Scheduler(self.workers)
        self._sessions = Sessions(limits.session_idle_s, limits.max_sessions)
        self._pool: Pool | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._session_cleaner: asyncio.Task[None] | None = None

    @property
    def gauges(self) -> dict[str, int]:
        """Calls in the queue, workers and live sessions."""
        return {"queue_depth": self._scheduler.depth, "workers": self.workers, "sessions": len(self._sessions)}

    @property
    def missing_layers(self) -> dict[str, str]:
        """Missing isolation layers: name -> reason. Empty before `start`."""
        return dict(self._pool.missing) if self._pool else {}

    async def start(self) -> Self:
        """Start the zygotes and return the sandbox; otherwise the first call starts them.

        Raises RuntimeError if they cannot start, and LayersMissing if `strict` is set and an isolation layer is missing.
        """
        await self._running_pool()
        return self

    async def aclose(self) -> None:
        """End all processes of the sandbox. Queued calls raise RuntimeError. Closing twice has no effect."""
        self._closed = True
        self._scheduler.close(RuntimeError("the sandbox was closed"))
        if self._session_cleaner:
            self._session_cleaner.cancel()
            self._session_cleaner = None
        self._sessions.close()
        pool, self._pool = self._pool, None
        if pool:
            await pool.close()

    def stream_call(self, call: Call) -> AsyncGenerator[Output | CallResult, None]:
        return stream_output(lambda on_output: self.run_call(call, on_output))

    async def close_session(self, name: str) -> None:
        self._sessions.drop(name, None)
        self._sessions.pop_loss(name)

    async def fork(self, session: str, n: int) -> list[str]:
        pool = await self._running_pool()
        if not isinstance(pool, SupervisorPool):
            raise ForkError(f"isolation: {self.isolation} does not support forks of sessions")
        if not 1 <= n < self.limits.max_sessions:
            raise ValueError(f"n: {n!r} must lie in [1, {self.limits.max_sessions})")
        original = self._sessions.find(session)
        if original is None or not original.alive:
            raise ValueError(f"session: {session!r} is not live; run a cell in it first")
        original.users += 1
        try:
            async with original.lock, self._slot() as slot:
                request = make_request(Call("", timeout_s=ANSWER_S, session=session), self.limits)
                on_waiting = partial(self._scheduler.mark_waiting, slot)
                names = await Forker(pool, self._sessions, request, on_waiting).fork(original, n)
                return names
        finally:
            self._sessions.done(original)

    async def run_call(self, call: Call, on_output: OnOutput | None = None) -> CallResult:
        """Run a call; see `run`. on_output: receives output while it runs."""
        job = make_job(call, self.limits, on_output)
        queued = time.monotonic()
        try:
            result = await (self._run_once(job) if call.session is None else self._run_cell(job))
        except TimeoutError:
            result = failure(Outcome.QUEUE_TIMEOUT, queue_s=time.monotonic() - queued)
        self.outcomes[result.outcome] += 1
        return result

    def _count(self, event: str, detail: str = "") -> None:
        self.events[event] += 1
        log_event(event, detail)

    async def _run_once(self, job: Job) -> CallResult:
        queued = time.monotonic()
        tier = tier_of(job.call.code, self._view.preload)
        await self._wait_for_tier(tier)
        async with self._slot() as slot:
            started, outcome = time.monotonic(), Outcome.SANDBOX_ERROR
            for attempt in range(1 if job.on_output else ATTEMPTS):
                if attempt:
                    self._count("retry", f"attempt {attempt + 1} of {ATTEMPTS}")
                    await asyncio.sleep(RETRY_PAUSE_S * attempt)
                try:
                    pool = await self._running_pool()
                    connection = await pool.acquire(tier)
                    answer = await self._call(connection, job, slot)
                    pool.release(connection)
                    return replace(answer.result, queue_s=started - queued)
                except SupervisorDied as error:
                    self._count(error.event)
                    outcome = error.outcome
                    if isinstance(error, SupervisorUnresponsive):
                        break
            return failure(outcome, duration_s=time.monotonic() - started, queue_s=started - queued)

    async def _run_cell(self, job: Job) -> CallResult:
        call = job.call
        assert call.session is not None
        queued = time.monotonic()
        tier = tier_of(call.code, self._view.preload, session=True)
        await self._wait_for_tier(tier)
        session = self._sessions.open(call.session)
        try:
            async with session.lock, self._slot() as slot:
                started = time.monotonic()
                result = await self._run_in_session(session, tier, job, slot)
                duration_s = result.duration_s or time.monotonic() - started
                return replace(result, duration_s=duration_s, queue_s=started - queued)
        finally:
            self._sessions.done(session)

    async def _run_in_session(self, session: Session, tier: str, job: Job, slot: Slot) -> CallResult:
        note = ""
        if session.connection is not None and not session.alive:
            self._sessions.record_loss(session.name, IDLE_ENDED if session.connection.session_ended else "it was lost")
            session.end()
        if session.connection is None:
            reason = self._sessions.pop_loss(session.name)
            note = f"[session restarted, earlier state is gone: {reason}]\n" if reason else ""
        try:
            if session.connection is None:
                pool = await self._running_pool()
                session.connection = await pool.start_supervisor(tier, session=True)
            answer = await self._call(session.connection, job, slot)
        except SupervisorDied as error:
            self._count(error.event, f"session {session.name}")
            session.connection = None
            if not isinstance(error, SessionRefused):
                self._sessions.record_loss(session.name, "it was lost")
            return failure(error.outcome, note + error.message)
        if not answer.alive and session.connection is not None:
            session.end()
            self._sessions.record_loss(session.name, f"its interpreter ended ({answer.result.outcome})")
            note += ENDED
        return replace(answer.result, stderr=note + answer.result.stderr)

    async def _call(self, connection: SupervisorConnection, job: Job, slot: Slot) -> Answer:
        def on_event(kind: bytes, body: bytes) -> None:
            if kind == protocol.LONG:
                self._scheduler.mark_long(slot)
            elif kind == protocol.OUTPUT and job.on_output:
                job.on_output(body[0], body[1:])
            elif kind in (protocol.WAITING, protocol.ACTIVE):
                self._scheduler.mark_waiting(slot, kind == protocol.WAITING)

        slot.on_preempt = partial(connection.send, protocol.YIELD)
        slot.on_resume = partial(connection.send, protocol.RESUME)
        starved_s = STARVED_TIMEOUTS * job.wall_s if "cgroup" in self.missing_layers else 0.0
        return await connection.call(job.message, job.wall_s + starved_s, on_event)

    async def _wait_for_tier(self, tier: str) -> None:
        """Wait until the tier's zygote is ready. Called before a call takes a slot, so that imports delay no other call."""
        with contextlib.suppress(SupervisorDied):
            await (await self._running_pool()).wait_for_tier(tier)

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[Slot]:
        slot = await self._scheduler.take(self.limits.queue_timeout_s)
        try:
            yield slot
        finally:
            self._scheduler.free(slot)

    async def _running_pool(self) -> Pool:
        if self._pool and self._pool.alive:
            return self._pool
        async with self._starting:
            if self._closed:
                raise RuntimeError("the sandbox is closed")
            if self._pool and not self._pool.alive:
                self.events["zygotes_restarted"] += 1
                log.warning("the sandbox's zygotes have ended; starting new ones")
                pool, self._pool = self._pool, None
                await pool.close()
            if self._pool is None:
                pool = POOLS[self.isolation](self.workers, self._view)
                try:
                    await pool.start()
                    check_layers(pool.missing, strict=self.strict)
                except BaseException:  # also a cancelled start: its processes would stay
                    await pool.close()
                    raise
                self._pool = pool
            if self._session_cleaner is None:
                self._session_cleaner = asyncio.create_task(self._sessions.drop_idle_ones())
            return self._pool
