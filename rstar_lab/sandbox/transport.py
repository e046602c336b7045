"""Transport of calls and results over Redis: keys, connection, the two steps that must be atomic, and signatures.

A call is an entry of the stream `calls` (a call of a session: of its worker's own stream). Workers read it through a consumer
group, so that it belongs to one worker until it is acknowledged. A result is an entry of the stream `results:CLIENT`. One
script acknowledges a call, deletes it and adds its result, so that only the first worker that acknowledges can answer. Times
come from Redis (entry ids), so the clocks of nodes need not agree. If RSTAR_LAB_SANDBOX_KEY is set, calls and results are signed, so
that write access to Redis alone allows neither running code nor forging results. Without it, everyone with the password of Redis can.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from rstar_lab.common.errors import UserError

log = logging.getLogger(__name__)
PREFIX = "rstar_lab:sandbox:1:"
CALLS = PREFIX + "calls"
WORKERS = PREFIX + "workers"  # sorted set: name|capacity -> Redis time of its last heartbeat, in ms
GROUP = "workers"

BLOCK_MS = 1000
SOCKET_TIMEOUT_S = 8.0  # must exceed BLOCK_MS, the duration of a blocking read
HEARTBEAT_S = 1.0
# Time without a heartbeat after which a worker counts as dead and other workers claim its calls.
DEAD_AFTER_MS = 6000
MAX_DELIVERIES = 3
RESULTS_KEPT_MS = 3_600_000

# Publishes a result. Returns 1, or 0 if the call was already acknowledged.
# KEYS: the stream of calls, the stream of results. ARGV: group, entry, call id, body, how long results are kept (ms), signature.
PUBLISH = """
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('XADD', KEYS[2], '*', 'id', ARGV[3], 'body', ARGV[4], 'sig', ARGV[6])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return 1
"""

# Returns the live worker that holds a session, and 1 if an earlier holder has died, else 0. Without a live holder, the proposed
# worker becomes the holder.
# KEYS: the session, the workers. ARGV: the proposed worker, how long a session is kept (ms), when a worker counts as dead (ms).
CLAIM_SESSION = """
local holder = redis.call('GET', KEYS[1])
if holder then
  local beat = redis.call('ZSCORE', KEYS[2], holder)
  local now = redis.call('TIME')
  if beat and now[1] * 1000 - beat < tonumber(ARGV[3]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return {holder, 0}
  end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {ARGV[1], holder and 1 or 0}
"""


def calls_of(worker: str) -> str:
    """Return the key of the stream for calls of the sessions that a worker holds."""
    return f"{CALLS}:{worker}"


def results_of(client: str) -> str:
    return f"{PREFIX}results:{client}"


def connect(url: str) -> aioredis.Redis:
    """Return a client that does not retry: only the caller knows whether a command may run twice.

    Raises UserError for an invalid address.
    """
    try:
        return aioredis.from_url(
            url,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=SOCKET_TIMEOUT_S,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as error:
        raise UserError(f"--redis {redacted(url)}: {error}; write redis://:PASSWORD@HOST:PORT/0") from error


def redacted(url: str) -> str:
    """Return the address without its password, for logs."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"


async def check(redis: aioredis.Redis, url: str) -> None:
    """Raise UserError if Redis is unreachable, refuses the password, or does not require one."""
    where = redacted(url)
    try:
        await redis.ping()
        protected = await needs_password(url)
    except (RedisError, OSError) as error:
        refused = isinstance(error, (AuthenticationError, ResponseError))
        remedy = (
            "give the password as redis://:PASSWORD@HOST:PORT/0"
            if refused
            else "start `redis-server`, or correct --redis"
        )
        raise UserError(f"no Redis at {where}: {error}; {remedy}") from error
    if not protected:
        raise UserError(
            f"{where} does not require a password, so anyone who can connect could run code on every worker: "
            "set one (requirepass) and use redis://:PASSWORD@HOST:PORT/0"
        )


async def needs_password(url: str) -> bool:
    """Return whether Redis refuses a connection without a password. A Unix socket counts as protected."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return True
    stranger = aioredis.Redis(
        host=parts.hostname or "127.0.0.1",
        port=parts.port or 6379,
        ssl=parts.scheme == "rediss",
        ssl_cert_reqs="none",
        socket_timeout=SOCKET_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )
    async with stranger:
        try:
            await stranger.ping()
        except (AuthenticationError, ResponseError):
            return True
    return False


async def forever(step: Callable[[], Awaitable[None]], what: str) -> None:
    """Repeat `step` until cancelled. After an error, wait and continue: calls stay in the streams, and would wait for ever."""
    delay = 0.05
    while True:
        try:
            await step()
            if delay > 0.05:
                log.warning("Redis answers again (%s)", what)
            delay = 0.05
        except Exception as error:
            if delay == 0.05:
                ours = not isinstance(error, (RedisError, OSError))
                log.warning("cannot %s: %s; trying again", what, error, exc_info=ours)
            await asyncio.sleep(delay)
            delay = min(2 * delay, 1.0)


async def end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks repeatedly until all have ended, because the Redis client can swallow a cancellation during a timeout."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.5)


async def make_group(redis: aioredis.Redis, stream: str) -> None:
    """Create the stream and its consumer group if they do not exist. The group starts with the oldest entry."""
    try:
        await redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
    except ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise


async def now_ms(redis: aioredis.Redis) -> int:
    seconds, microseconds = await redis.time()
    return seconds * 1000 + microseconds // 1000


def entry_number(entry: bytes) -> tuple[int, int]:
    """Return the id of an entry, which can be compared: the milliseconds at which Redis added it, and a sequence number."""
    ms, _, sequence = entry.partition(b"-")
    return int(ms), int(sequence or 0)


async def live_workers(redis: aioredis.Redis) -> dict[str, int]:
    """Return name -> capacity of the workers with a recent heartbeat."""
    since = await now_ms(redis) - DEAD_AFTER_MS
    members: list[Any] = await redis.zrangebyscore(WORKERS, since, "+inf")
    workers = {}
    for member in members:
        # Anything else in the set was not written by a worker.
        with contextlib.suppress(ValueError):
            name = member.decode()
            workers[name] = int(name.rpartition("|")[2] if "|" in name else "")
    return workers


KEY = "RSTAR_LAB_SANDBOX_KEY"
MIN_KEY = 16


class InvalidSignatureError(RuntimeError):
    """A call or result was not signed with the key of this process."""


class Signer:
    """Signs with HMAC-SHA256 and the key in the environment variable RSTAR_LAB_SANDBOX_KEY. Without a key, nothing is checked.

    All services and workers of a Redis must have the same key. Raises UserError if the key is too short.
    """

    def __init__(self) -> None:
        self._key = os.environ.get(KEY, "").encode()
        if self._key and len(self._key) < MIN_KEY:
            raise UserError(f"{KEY}: the key must have at least {MIN_KEY} characters; `openssl rand -hex 32` makes one")

    def sign(self, kind: str, *parts: str | bytes) -> str:
        """Return the signature. kind, parts: `call`, id, client and body of a call; or `result`, id of the call and body."""
        if not self._key:
            return ""
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (kind, *parts):
            data = part.encode() if isinstance(part, str) else part
            mac.update(len(data).to_bytes(8, "little") + data)
        return mac.hexdigest()

    def check(self, signature: bytes, kind: str, *parts: str | bytes) -> None:
        """Raise InvalidSignatureError unless the signature is that of `sign` for the same arguments."""
        if self._key and not hmac.compare_digest(signature, self.sign(kind, *parts).encode()):
            raise InvalidSignatureError(f"no valid signature: set the same {KEY} for all services and workers")
