"""Worker: takes calls from Redis, runs them on this machine and sends the results. Any number of workers can share a Redis."""

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from redis.exceptions import RedisError

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import transport
from rstar_lab.sandbox.call import CallResult, call_id, failure, log_failure, result_of
from rstar_lab.sandbox.serve import LocalBackend
from rstar_lab.sandbox.transport import Signer, end, forever
from rstar_lab.sandbox.wire import dumps, work_from_json

log = logging.getLogger(__name__)

RESULTS_BATCH = 64


@dataclass(frozen=True, slots=True)
class Delivery:
    """A call as received from Redis. stream, entry: where it is. wait_s: seconds it may wait before it starts."""

    stream: str
    entry: bytes
    call_id: bytes
    client: str
    wait_s: float
    body: bytes
    signature: bytes = b""

    @classmethod
    def of(cls, stream: str, entry: bytes, fields: dict[bytes, bytes]) -> "Delivery":
        """Parse an entry. Raises KeyError or ValueError for an invalid one."""
        wait_s = float(fields[b"wait"])
        if not math.isfinite(wait_s):
            raise ValueError(f"wait: {wait_s}")
        signature = fields.get(b"sig", b"")
        return cls(stream, entry, fields[b"id"], fields[b"client"].decode(), wait_s, fields[b"body"], signature)


class Worker:
    """Moves calls from Redis to `backend` and results back, in batches."""

    def __init__(self, url: str, backend: LocalBackend, *, drain_s: float) -> None:
        self.url = url
        self.drain_s = drain_s
        self.backend = backend
        self.redis = transport.connect(url)
        self.signer = Signer()
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}|{backend.workers}"
        self.own_stream = transport.calls_of(self.name)
        self.in_flight: dict[tuple[str, bytes], asyncio.Task[None]] = {}
        self.results: deque[tuple[Delivery, bytes]] = deque()
        self.something_to_send = asyncio.Event()
        self.room_changed = asyncio.Event()
        self.clock_offset_ms = 0.0
        self.stopping = asyncio.Event()
        self.answered = 0

    async def serve(self, announce: Callable[[], None]) -> None:
        """Run calls until `stopping` is set; then finish running calls and return the others to Redis.

        Raises UserError if Redis is unreachable or has no password.
        """
        await transport.check(self.redis, self.url)
        await self.heartbeat()
        announce()
        reading = asyncio.create_task(forever(self.read_calls, "read calls"))
        others = [
            asyncio.create_task(forever(self.publish_results, "send results")),
            asyncio.create_task(forever(self.send_heartbeats, "send heartbeats")),
            asyncio.create_task(forever(self.claim_stale_calls, "look for the calls of dead workers")),
        ]
        await self.stopping.wait()
        reading.cancel()
        await self.drain()
        await end([reading, *others])
        with contextlib.suppress(RedisError, OSError):
            # Other workers claim the unfinished calls of this one, as those of a dead worker.
            await self.redis.zrem(transport.WORKERS, self.name)
            await self.redis.delete(self.own_stream)
            if not self.in_flight:
                await self.redis.xgroup_delconsumer(transport.CALLS, transport.GROUP, self.name)
        await self.redis.aclose()

    async def read_calls(self) -> None:
        room = self.backend.prefetch_limit - len(self.in_flight)
        if room <= 0:
            self.room_changed.clear()
            await self.room_changed.wait()
            return
        reply: Any = await self.redis.xreadgroup(
            transport.GROUP, self.name, {transport.CALLS: ">", self.own_stream: ">"},
            count=room, block=transport.BLOCK_MS,
        )  # fmt: skip
        for stream, entries in reply:
            for entry, fields in entries:
                self.accept(stream.decode(), entry, fields)

    def accept(self, stream: str, entry: bytes, fields: dict[bytes, bytes] | None) -> None:
        if (stream, entry) in self.in_flight or not fields:
            return
        try:
            delivery = Delivery.of(stream, entry, fields)
        except (KeyError, ValueError) as error:
            log.error("dropped entry %s of %s: not a valid call (%s)", entry.decode(), stream, error)
            task = asyncio.create_task(self.drop(stream, entry))
        else:
            task = asyncio.create_task(self.run(delivery))
        self.in_flight[stream, entry] = task

    async def drop(self, stream: str, entry: bytes) -> None:
        try:
            with contextlib.suppress(RedisError, OSError):
                await self.redis.xack(stream, transport.GROUP, entry)
                await self.redis.xdel(stream, entry)
        finally:
            self.done(stream, entry)

    def done(self, stream: str, entry: bytes) -> None:
        self.in_flight.pop((stream, entry), None)
        self.room_changed.set()

    async def run(self, delivery: Delivery) -> None:
        waited_s = (time.time() * 1000 + self.clock_offset_ms - transport.entry_number(delivery.entry)[0]) / 1000
        if waited_s > delivery.wait_s:
            result = failure(Outcome.QUEUE_TIMEOUT, f"not started within {delivery.wait_s:g} s", queue_s=waited_s)
        else:
            with call_id(delivery.call_id.decode(errors="replace")):
                result = await result_of(self.run_signed(delivery))
                log_failure(result)
        self.answer(delivery, result)

    async def run_signed(self, delivery: Delivery) -> CallResult:
        self.signer.check(delivery.signature, "call", delivery.call_id, delivery.client, delivery.body)
        return await self.backend.run(work_from_json(delivery.body))

    def answer(self, delivery: Delivery, result: CallResult) -> None:
        self.results.append((delivery, dumps(asdict(result))))
        self.something_to_send.set()

    async def publish_results(self) -> None:
        await self.something_to_send.wait()
        # The results stay in the queue until they are sent. If Redis has received them in spite of an error, the second attempt has
        # no effect.
        batch = list(islice(self.results, RESULTS_BATCH))
        async with self.redis.pipeline(transaction=False) as pipe:
            for delivery, body in batch:
                pipe.eval(
                    transport.PUBLISH, 2, delivery.stream, transport.results_of(delivery.client),
                    transport.GROUP, delivery.entry, delivery.call_id, body, transport.RESULTS_KEPT_MS,
                    self.signer.sign("result", delivery.call_id, body),
                )  # fmt: skip
            self.answered += sum(await pipe.execute())
        for delivery, _ in batch:
            self.results.popleft()
            self.done(delivery.stream, delivery.entry)
        if not self.results:
            self.something_to_send.clear()

    async def send_heartbeats(self) -> None:
        await asyncio.sleep(transport.HEARTBEAT_S)
        await self.heartbeat()

    async def heartbeat(self) -> None:
        """Send a heartbeat, renew the claim on all calls in flight, and create the groups again if Redis has lost its data."""
        for stream in (transport.CALLS, self.own_stream):
            await transport.make_group(self.redis, stream)
        before = time.time() * 1000
        server = await transport.now_ms(self.redis)
        self.clock_offset_ms = server - (before + time.time() * 1000) / 2
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.zadd(transport.WORKERS, {self.name: server})
            pipe.zremrangebyscore(transport.WORKERS, "-inf", server - 10 * transport.DEAD_AFTER_MS)
            pipe.pexpire(self.own_stream, 10 * transport.DEAD_AFTER_MS)
            for stream in (transport.CALLS, self.own_stream):
                held = [entry for its_stream, entry in self.in_flight if its_stream == stream]
                if held:
                    pipe.xclaim(stream, transport.GROUP, self.name, 0, held, idle=0, justid=True)  # type: ignore[arg-type]
            await pipe.execute()

    async def claim_stale_calls(self) -> None:
        """Take over calls of dead workers, up to the number of calls that this worker may still accept."""
        await asyncio.sleep(transport.HEARTBEAT_S)
        room = self.backend.prefetch_limit - len(self.in_flight)
        if room <= 0:
            return
        idle: Any = await self.redis.xpending_range(
            transport.CALLS, transport.GROUP, "-", "+", room, idle=transport.DEAD_AFTER_MS
        )
        for item in idle:
            entry = item["message_id"]
            claimed: Any = await self.redis.xclaim(
                transport.CALLS, transport.GROUP, self.name, transport.DEAD_AFTER_MS, [entry]
            )
            for its_entry, fields in claimed:
                log.warning("taking over call %s of %s", its_entry.decode(), item["consumer"].decode())
                if item["times_delivered"] >= transport.MAX_DELIVERIES and fields:
                    why = f"{item['times_delivered']} workers died while they ran this call"
                    self.answer(Delivery.of(transport.CALLS, its_entry, fields), failure(Outcome.SANDBOX_ERROR, why))
                else:
                    self.accept(transport.CALLS, its_entry, fields)

    async def drain(self) -> None:
        """Wait up to `drain_s` for running calls."""
        deadline = time.monotonic() + self.drain_s
        while self.in_flight and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
