"""Backend that sends calls to workers through Redis and returns exactly one result for each."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self

from redis.exceptions import RedisError

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import transport
from rstar_lab.sandbox.call import CallResult, OnOutput, failure
from rstar_lab.sandbox.limits import MAX_TIMEOUT_S
from rstar_lab.sandbox.transport import InvalidSignatureError, Signer, end, forever
from rstar_lab.sandbox.wire import Work, dumps, result_from_json, session_of, work_to_dict

log = logging.getLogger(__name__)

BATCH = 256
SESSION_KEPT_MS = 3_600_000
# A call that a worker has taken counts as lost this many seconds after all its limits.
ANSWER_GRACE_S = 60.0


@dataclass(slots=True, eq=False)
class Pending:
    """A call without a result yet."""

    call_id: str
    stream: str
    body: bytes
    future: asyncio.Future[CallResult]
    session: bool
    submitted: float = field(default_factory=time.monotonic)
    entry: bytes | None = None
    # Consecutive checks in which its entry was missing without a result. Two mean that Redis lost it.
    missing: int = 0


class RedisBackend:
    """Runs work on the workers of a Redis, which are started with `rstar-lab sandbox worker`."""

    def __init__(self, url: str, *, wait_s: float) -> None:
        """wait_s: longest time in seconds that a call waits for a worker."""
        self.url = url
        self.redis = transport.connect(url)
        self.signer = Signer()
        self.client = secrets.token_hex(8)
        self.results = transport.results_of(self.client)
        self.wait_s = wait_s
        self.pending: dict[str, Pending] = {}
        self.to_send: deque[Pending] = deque()
        self.something_to_send = asyncio.Event()
        self.workers: dict[str, int] = {}
        self.last_delivered = (0, 0)
        self.last = b"0"  # entry of the last result that was read
        self.count = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Self:
        """Connect and start the background tasks. Raises UserError if Redis is unreachable or has no password."""
        await transport.check(self.redis, self.url)
        await self.refresh_workers()
        self.tasks = [
            asyncio.create_task(forever(self.send_batch, "send calls")),
            asyncio.create_task(forever(self.read_results, "read results")),
            asyncio.create_task(forever(self.watch, "watch the queue")),
        ]
        return self

    async def aclose(self) -> None:
        await end(self.tasks)
        self.tasks = []
        for pending in list(self.pending.values()):
            self.answer(pending, failure(Outcome.SANDBOX_ERROR, "the service has stopped"))
        with contextlib.suppress(RedisError, OSError):
            await self.redis.delete(self.results)
        await self.redis.aclose()

    @property
    def gauges(self) -> dict[str, int]:
        waiting = sum(self.is_waiting(pending) for pending in self.pending.values())
        return {"queue_depth": waiting, "workers": sum(self.workers.values())}

    async def run(self, work: Work, on_output: OnOutput | None = None) -> CallResult:
        """Return one result for the work, even if workers fail. `on_output` is not called. Raises RedisError for a session."""
        session = session_of(work)
        if session is None:
            return await self.submit(work, transport.CALLS)
        holder, lost = await self.worker_of_session(session)
        if holder is None:
            return failure(
                Outcome.QUEUE_TIMEOUT,
                f"no worker was running for {self.wait_s:g} s; start one with `rstar-lab sandbox worker`",
                queue_s=self.wait_s,
            )
        result = await self.submit(work, transport.calls_of(holder), session=True)
        if lost:
            note = "[session restarted, earlier state is gone: its worker died]\n"
            result = replace(result, stderr=note + result.stderr)
        return result

    async def submit(self, work: Work, stream: str, *, session: bool = False) -> CallResult:
        self.count += 1
        pending = Pending(
            f"{self.client}:{self.count}",
            stream,
            dumps(work_to_dict(work)),
            asyncio.get_running_loop().create_future(),
            session,
        )
        self.pending[pending.call_id] = pending
        self.enqueue(pending)
        try:
            return await pending.future
        finally:
            self.pending.pop(pending.call_id, None)
            if pending.entry:  # expired or cancelled
                with contextlib.suppress(RedisError, OSError):
                    await self.redis.xdel(pending.stream, pending.entry)

    async def worker_of_session(self, session: str) -> tuple[str | None, bool]:
        """Return the worker that holds the session (None: no worker), and whether an earlier holder has died."""
        deadline = time.monotonic() + self.wait_s
        while not self.workers:
            if time.monotonic() > deadline:
                return None, False
            await asyncio.sleep(0.2)
        proposal = secrets.choice(list(self.workers))
        holder, lost = await self.redis.eval(
            transport.CLAIM_SESSION, 2, f"{transport.PREFIX}session:{session}", transport.WORKERS,
            proposal, SESSION_KEPT_MS, transport.DEAD_AFTER_MS,
        )  # fmt: skip
        return holder.decode(), bool(lost)

    def enqueue(self, pending: Pending) -> None:
        pending.entry, pending.missing = None, 0
        self.to_send.append(pending)
        self.something_to_send.set()

    def answer(self, pending: Pending, result: CallResult) -> None:
        """Set the result of a call. Only this method sets results; a second result of a call is ignored."""
        self.pending.pop(pending.call_id, None)
        if not pending.future.done():
            queue_s = max(0.0, time.monotonic() - pending.submitted - result.duration_s)
            pending.future.set_result(replace(result, queue_s=queue_s))

    async def send_batch(self) -> None:
        await self.something_to_send.wait()
        # The calls stay in the queue until they are sent. If Redis has received them in spite of an error, they run twice, and
        # the second result is ignored.
        taken = list(islice(self.to_send, BATCH))
        batch = [pending for pending in taken if pending.call_id in self.pending]
        async with self.redis.pipeline(transaction=False) as pipe:
            for pending in batch:
                fields = {"id": pending.call_id, "client": self.client, "wait": self.wait_s, "body": pending.body}
                fields["sig"] = self.signer.sign("call", pending.call_id, self.client, pending.body)
                pipe.xadd(pending.stream, fields)  # type: ignore[arg-type]
            entries = await pipe.execute() if batch else []
        for pending, entry in zip(batch, entries, strict=True):
            pending.entry = entry
        for _ in taken:
            self.to_send.popleft()
        if not self.to_send:
            self.something_to_send.clear()

    async def watch(self) -> None:
        await asyncio.sleep(transport.HEARTBEAT_S)
        try:
            await self.refresh_workers()
            await self.resend_lost_calls()
        finally:
            self.end_hopeless_calls()

    async def refresh_workers(self) -> None:
        await transport.make_group(self.redis, transport.CALLS)
        self.workers = await transport.live_workers(self.redis)
        groups = await self.redis.xinfo_groups(transport.CALLS)
        for group in groups:
            self.last_delivered = transport.entry_number(group["last-delivered-id"])
        await self.redis.pexpire(self.results, transport.RESULTS_KEPT_MS)

    def is_waiting(self, pending: Pending) -> bool:
        """Return whether no worker has taken the call, as of the last refresh. Calls of sessions count as taken once sent."""
        return pending.entry is None or (
            not pending.session and transport.entry_number(pending.entry) > self.last_delivered
        )

    def end_hopeless_calls(self) -> None:
        """End calls that waited or ran too long, or whose session's worker has died, as of the last refresh."""
        alive = {transport.calls_of(worker) for worker in self.workers}
        for pending in list(self.pending.values()):
            age = time.monotonic() - pending.submitted
            if age > self.wait_s and self.is_waiting(pending):
                why = "all workers were busy" if self.workers else "no worker is running"
                self.answer(pending, failure(Outcome.QUEUE_TIMEOUT, f"not started within {self.wait_s:g} s: {why}"))
            elif pending.session and pending.stream not in alive:
                why = "the worker that held this session has died, and the session's state with it"
                self.answer(pending, failure(Outcome.SANDBOX_ERROR, why))
            elif age > self.wait_s + MAX_TIMEOUT_S + ANSWER_GRACE_S:
                self.answer(pending, failure(Outcome.SANDBOX_ERROR, f"no answer from the workers within {age:.0f} s"))

    async def resend_lost_calls(self) -> None:
        """Send calls again that Redis has lost because it restarted without its append-only file."""
        now = time.monotonic()
        old = [
            pending
            for pending in self.pending.values()
            if pending.entry and now - pending.submitted > 2 * transport.HEARTBEAT_S
        ][:4096]
        async with self.redis.pipeline(transaction=False) as pipe:
            for pending in old:
                pipe.xrange(pending.stream, pending.entry, pending.entry)  # type: ignore[arg-type]
            results = await pipe.execute() if old else []
        lost = []
        for pending, entries in zip(old, results, strict=True):
            pending.missing = 0 if entries else pending.missing + 1
            if pending.missing >= 2 and pending.call_id in self.pending:
                lost.append(pending)
        if lost:
            log.error(
                "Redis has lost %d calls, which are sent again; was it restarted without `appendonly yes`?", len(lost)
            )
        for pending in lost:
            if pending.session:
                why = "Redis lost this call of a session, whose state is unknown"
                self.answer(pending, failure(Outcome.SANDBOX_ERROR, why))
            else:
                self.enqueue(pending)

    async def read_results(self) -> None:
        """Read results in order; continue where the last call of this method stopped, also after a lost connection."""
        reply: Any = await self.redis.xread({self.results: self.last}, count=BATCH, block=transport.BLOCK_MS)
        for entry, fields in reply[0][1] if reply else []:
            self.last = entry
            pending = self.pending.get(fields.get(b"id", b"").decode(errors="replace"))
            if pending:
                pending.entry = None  # deleted by the worker
                try:
                    self.signer.check(fields.get(b"sig", b""), "result", fields[b"id"], fields[b"body"])
                    result = result_from_json(fields[b"body"])
                except (InvalidSignatureError, KeyError, ValueError) as error:
                    why = f"cannot read the result; does the worker have another version or key? {error}"
                    result = failure(Outcome.SANDBOX_ERROR, why)
                self.answer(pending, result)
        if reply:
            await self.redis.xtrim(self.results, minid=self.last.decode(), approximate=False)
