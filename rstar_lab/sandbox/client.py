"""SandboxClient: a remote sandbox service with the interface of LocalSandbox."""

import asyncio
import logging
import os
import random
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import NoReturn

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from rstar_lab.common.errors import UserError
from rstar_lab.common.http_answers import limit_answers
from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.common.service_tokens import find_token
from rstar_lab.sandbox.call import Call, CallResult, ForkError, Output, failure
from rstar_lab.sandbox.interface import Sandbox
from rstar_lab.sandbox.wire import SessionEnd, SessionFork, Work, dumps, line_from_json, session_of, work_to_dict

BATCH, BATCH_BYTES = 64, 8 * 1024 * 1024
MAX_ANSWER_BYTES = 256 * 1024 * 1024  # of a batch; calls without a result are sent again
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 5.0
# Statuses of a service that can answer later: it is stopping or overloaded, or a proxy does not reach it.
TRANSIENT = frozenset({408, 425, 429, 499, *range(500, 600)})
# A call that ends as `sandbox_error` this often is not run again: the failure may be its own.
MOST_SANDBOX_ERRORS = 8
# Seconds between two lines of the log about failures, which a service with a full queue can cause all the time.
LOG_EVERY_S = 60.0
_NAMES = TypeAdapter(list[str])
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Waiting:
    """A call that has no result yet."""

    work: Work
    deadline: float
    future: asyncio.Future[CallResult]
    attempts: int = 0
    sandbox_errors: int = 0
    last: CallResult | None = None
    submitted: float = field(default_factory=time.monotonic)

    @property
    def size(self) -> int:
        return sum(len(value) for value in asdict(self.work).values() if isinstance(value, str))

    @property
    def in_session(self) -> bool:
        return session_of(self.work) is not None


class SandboxClient(Sandbox):
    """Runs calls on a service that was started with `rstar-lab sandbox serve`.

    Calls made at the same time share requests of up to 64 calls; results arrive one by one. Failures of the
    infrastructure (lost connection, full queue, `queue_timeout`) are retried with growing pauses until `deadline_s` after the
    call, `sandbox_error` at most 8 times; then the last failure is returned. A call of a session is retried only if it cannot have
    run. A service with Redis workers sends the output of a streamed call together with its result.

    url: address of the service, such as http://127.0.0.1:8088. token: default: the environment variable
    RSTAR_LAB_SANDBOX_TOKEN, else the token file of a service that this user has started. connections: largest number of
    concurrent requests.
    `run` raises UserError if the token is refused or the server is not a sandbox service, and ValueError if the service rejects an
    argument.
    """

    def __init__(self, url: str, token: str | None = None, *, deadline_s: float = 600.0, connections: int = 32) -> None:
        self._token = token or os.environ.get("RSTAR_LAB_SANDBOX_TOKEN")
        self.url = url.rstrip("/")
        self.deadline_s = deadline_s
        self.retries = 0
        http = httpx.AsyncClient(
            timeout=httpx.Timeout(30.0, read=None, pool=None),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=False,
        )
        self.http = limit_answers(http, MAX_ANSWER_BYTES, deadline_s)
        self.slots = asyncio.Semaphore(connections)
        self.waiting: deque[Waiting] = deque()
        self.tasks: set[asyncio.Task[None]] = set()
        self.flush_planned = False
        self.closed = self.failing = False
        self.logged = -LOG_EVERY_S

    async def aclose(self) -> None:
        self.closed = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.http.aclose()

    async def run_call(self, call: Call) -> CallResult:
        return await self.submit(call)

    async def stream_call(self, call: Call) -> AsyncGenerator[Output | CallResult, None]:
        end = asyncio.get_running_loop().time() + self.deadline_s
        result = failure(Outcome.SANDBOX_ERROR, f"{self.url}: the response ended before the result")
        try:
            async with aclosing(self._lines([call], stream=True)) as lines:
                while True:
                    async with asyncio.timeout_at(end):
                        line = await anext(lines, None)
                    if line is None:
                        break
                    if isinstance(line[1], Output):
                        yield line[1]
                    else:
                        result = line[1]
        except (httpx.HTTPError, OSError) as error:
            result = self._failure(error)
        yield result

    async def _lines(
        self, calls: list[Work], *, stream: bool = False
    ) -> AsyncGenerator[tuple[int, CallResult | Output], None]:
        """Send calls in one request; yield (index, result or output) as they arrive.

        Raises httpx.HTTPError or OSError for a failure that may be transient, ValueError for invalid calls, and UserError if
        the server refuses the token or is not a sandbox service.
        """
        body = dumps({"calls": [work_to_dict(call) for call in calls], "stream": stream})
        token = self._token or find_token(self.url)  # a restarted service has a new token
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        async with self.http.stream("POST", f"{self.url}/calls", content=body, headers=headers) as response:
            if response.status_code != 200:
                raise_refusal(self.url, response, await response.aread())
            async for line in response.aiter_lines():
                try:
                    answer = line_from_json(line, len(calls))
                except ValueError as error:
                    raise UserError(f"{self.url}: not an answer of a sandbox service: {line[:80]!r}") from error
                yield answer

    async def close_session(self, name: str) -> None:
        await self.submit(SessionEnd(name))

    async def fork(self, session: str, n: int) -> list[str]:
        result = await self.submit(SessionFork(session, n))
        if result.outcome is Outcome.INVALID_ARGUMENTS:
            raise ValueError(result.stderr)
        if result.outcome is not Outcome.OK or result.value is None:
            raise ForkError(result.stderr or str(result.outcome))
        return _NAMES.validate_json(result.value)

    async def submit(self, work: Work) -> CallResult:
        if self.closed:
            raise RuntimeError("this SandboxClient is closed")
        item = Waiting(work, time.monotonic() + self.deadline_s, asyncio.get_running_loop().create_future())
        self.enqueue(item)
        try:
            await asyncio.wait({item.future}, timeout=self.deadline_s + 1)
            return item.future.result() if item.future.done() else item.last or self._late()
        finally:
            item.future.cancel()

    def _late(self) -> CallResult:
        return failure(Outcome.QUEUE_TIMEOUT, f"no result from {self.url} within {self.deadline_s:g} s")

    def _failure(self, error: Exception) -> CallResult:
        """Return the result for a failure of the connection or the server; log the first of several in a row."""
        if isinstance(error, TimeoutError):
            return self._late()
        text = f"{self.url}: {type(error).__name__}: {error}"
        if not self.failing and time.monotonic() - self.logged > LOG_EVERY_S:
            self.logged = time.monotonic()
            log.warning("%s; calls are sent again until their deadline (%g s)", text, self.deadline_s)
        self.failing = True
        return failure(Outcome.QUEUE_TIMEOUT if is_busy(error) else Outcome.SANDBOX_ERROR, text)

    def enqueue(self, item: Waiting) -> None:
        self.waiting.append(item)
        if not self.flush_planned:
            self.flush_planned = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send the calls made in this iteration of the event loop, in as few requests as possible."""
        self.flush_planned = False
        while self.waiting:
            batch: list[Waiting] = []
            size = 0
            while self.waiting and len(batch) < BATCH and size < BATCH_BYTES:
                batch.append(self.waiting.popleft())
                size += batch[-1].size
            task = asyncio.create_task(self.send(batch))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def send(self, batch: list[Waiting]) -> None:
        pause = 0.0
        try:
            async with self.slots:
                batch = [item for item in batch if not item.future.done()]
                if batch:
                    await self.request(batch)
        except (httpx.HTTPError, OSError) as error:
            pause = retry_after(error.response) if isinstance(error, httpx.HTTPStatusError) else 0.0
            unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout) or is_busy(error)
            result = self._failure(error)
            for item in batch:
                if not item.future.done():
                    item.last = item.last if item.last and isinstance(error, TimeoutError) else result
                    if item.in_session and not unsent:
                        item.future.set_result(result)
        except Exception as error:
            if isinstance(error, ValueError) and len(batch) > 1:
                # One call is invalid: send each in its own request to find out which.
                await asyncio.gather(*(self.send([item]) for item in batch))
                return
            for item in batch:
                if not item.future.done():
                    item.future.set_exception(error)
        unanswered = [item for item in batch if not item.future.done()]
        if unanswered:
            await self.retry(unanswered, pause)

    async def request(self, batch: list[Waiting]) -> None:
        """Send a batch and set its results. Raises what `_lines` raises, and TimeoutError after the last deadline of the batch."""
        # httpx ends an answer that arrives too slowly at the deadline itself, with the reason.
        left_s = max(item.deadline for item in batch) - time.monotonic() + 0.5
        async with asyncio.timeout(left_s), aclosing(self._lines([item.work for item in batch])) as lines:
            answered = 0
            async for index, result in lines:
                if isinstance(result, CallResult):
                    answered += 1
                    self.give(batch[index], result)
        if answered < len(batch):
            raise httpx.RemoteProtocolError("the response ended before all results")
        self.failing = False

    def give(self, item: Waiting, result: CallResult) -> None:
        if item.future.done():
            return
        item.sandbox_errors += result.outcome is Outcome.SANDBOX_ERROR
        again = result.outcome in INFRASTRUCTURE_FAILURES and item.sandbox_errors < MOST_SANDBOX_ERRORS
        if again and not item.in_session and time.monotonic() < item.deadline:
            item.last = result
        else:
            item.future.set_result(result)

    async def retry(self, unanswered: list[Waiting], pause: float) -> None:
        attempts = max(item.attempts for item in unanswered)
        backoff = min(RETRY_MOST_S, RETRY_FIRST_S * 2**attempts) * random.uniform(0.5, 1.0)
        pause = max(pause, backoff)
        for item in unanswered:
            item.attempts += 1
            self.retries += 1
            if time.monotonic() + pause > item.deadline:
                item.future.set_result(item.last or self._late())
        await asyncio.sleep(pause)
        for item in unanswered:
            if not item.future.done():
                self.enqueue(item)


def is_busy(error: Exception) -> bool:
    """Return whether a service has refused a request that it can answer later: its queue is full, or it is stopping."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (429, 503)


def raise_refusal(url: str, response: httpx.Response, body: bytes) -> NoReturn:
    """Raise the error for a response with a status other than 200; see `SandboxClient._lines`."""
    status = response.status_code
    detail = error_detail(body)
    if status in TRANSIENT:
        raise httpx.HTTPStatusError(f"{status}: {detail}", request=response.request, response=response)
    if status == 401:
        raise UserError(
            f"{url}: wrong token, or none; set RSTAR_LAB_SANDBOX_TOKEN or pass `token` to SandboxClient. The token file of a "
            "service is found only by the user who started it"
        )
    if status in (400, 413, 415, 422):
        raise ValueError(f"{url}: {detail}")
    raise UserError(
        f"{url}: no sandbox service (POST /calls returned {status}: {detail}); start one with `rstar-lab sandbox serve`"
    )


def retry_after(response: httpx.Response) -> float:
    """Return the seconds that a service asks its client to wait: 0 to 60."""
    seconds = response.headers.get("Retry-After", "")
    return min(60.0, float(seconds)) if seconds.isdecimal() else 0.0


class _Problem(BaseModel):
    loc: list[str | int] = []
    msg: str = ""


class _Error(BaseModel):
    """The body of an error of a service."""

    detail: str | list[_Problem]


def error_detail(body: bytes) -> str:
    """Return the message of an error of a service; of another server, the start of its answer."""
    try:
        detail = _Error.model_validate_json(body).detail
    except ValidationError:
        return body[:200].decode(errors="replace")
    if isinstance(detail, str):
        return detail
    return "; ".join(f"{'.'.join(map(str, problem.loc))}: {problem.msg}" for problem in detail)
