"""SandboxClient: a remote sandbox service with the interface of LocalSandbox."""

import asyncio
import json
import os
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import httpx

from rstar_lab.common.errors import UserError
from rstar_lab.common.http_answers import limit_answers
from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.common.service_tokens import find_token
from rstar_lab.sandbox.call import Call, CallResult, ForkError, Output
from rstar_lab.sandbox.interface import Sandbox
from rstar_lab.sandbox.wire import (
    SessionEnd,
    SessionFork,
    Verification,
    Work,
    dumps,
    failure,
    result_from_dict,
    session_of,
    work_to_dict,
)

BATCH, BATCH_BYTES = 64, 8 * 1024 * 1024
MAX_ANSWER_BYTES = 256 * 1024 * 1024  # of a batch; calls without a result are sent again
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 5.0
# A call that ends as `sandbox_error` this often is not run again: the failure may be its own.
MOST_SANDBOX_ERRORS = 8


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
    `run` raises UserError if the token is refused, and ValueError if the service rejects an argument.
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
        self.closed = False

    async def start(self) -> Self:
        return self

    async def aclose(self) -> None:
        self.closed = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.http.aclose()

    async def run_call(self, call: Call) -> CallResult:
        return await self.submit(call)

    async def stream_call(self, call: Call) -> AsyncGenerator[Output | CallResult, None]:
        body = dumps({"calls": [{**work_to_dict(call), "stream": True}]})
        headers = self._headers()
        result = failure(Outcome.SANDBOX_ERROR, f"{self.url}: the response ended before the result")
        try:
            async with self.http.stream("POST", f"{self.url}/calls", content=body, headers=headers) as response:
                if response.status_code != 200:
                    refused(self.url, response, await response.aread())
                    yield failure(Outcome.QUEUE_TIMEOUT, f"{self.url} is busy or stopping")
                    return
                async for line in response.aiter_lines():
                    with readable_line():
                        data = json.loads(line)
                        del data["index"]
                        part = Output(**data) if "stream" in data else result_from_dict(data)
                    if isinstance(part, Output):
                        yield part
                    else:
                        result = part
        except (httpx.HTTPError, OSError) as error:
            result = failure(Outcome.SANDBOX_ERROR, f"{self.url}: {type(error).__name__}: {error}")
        yield result

    async def close_session(self, name: str) -> None:
        await self.submit(SessionEnd(name))

    async def fork(self, session: str, n: int) -> list[str]:
        result = await self.submit(SessionFork(session, n))
        if result.outcome is Outcome.INVALID_ARGUMENTS:
            raise ValueError(result.stderr)
        if result.outcome is not Outcome.OK or result.value is None:
            raise ForkError(result.stderr or str(result.outcome))
        return json.loads(result.value)

    async def verify(self, response_text: str, answer: str) -> bool:
        """Run rstar_lab.verify.verify on the service. Raises RuntimeError if there is no result before the deadline."""
        result = await self.submit(Verification(response_text, answer))
        if result.outcome is not Outcome.OK:
            raise RuntimeError(f"the answer could not be verified: {result.outcome}: {result.stderr}")
        return result.value == "True"

    async def submit(self, work: Work) -> CallResult:
        if self.closed:
            raise RuntimeError("this SandboxClient is closed")
        item = Waiting(work, time.monotonic() + self.deadline_s, asyncio.get_running_loop().create_future())
        self.enqueue(item)
        try:
            await asyncio.wait({item.future}, timeout=self.deadline_s + 1)
        except asyncio.CancelledError:
            item.future.cancel()
            raise
        if item.future.done():
            return item.future.result()
        item.future.cancel()
        return item.last or failure(Outcome.QUEUE_TIMEOUT, f"no result from {self.url} within {self.deadline_s:g} s")

    def _headers(self) -> dict[str, str]:
        # A service that was started again has another token.
        token = self._token or find_token(self.url)
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

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
                pause = await self.request(batch) if batch else 0.0
        except (httpx.HTTPError, OSError) as error:
            sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
            result = failure(Outcome.SANDBOX_ERROR, f"{self.url}: {type(error).__name__}: {error}")
            for item in batch:
                if not item.future.done():
                    item.last = result
                    if sent and item.in_session:
                        item.future.set_result(result)
        except Exception as error:
            if len(batch) > 1:  # one call is invalid: send each in its own request to find out which
                await asyncio.gather(*(self.send([item]) for item in batch))
                return
            batch[0].future.set_exception(error)
        unanswered = [item for item in batch if not item.future.done()]
        if unanswered:
            await self.retry(unanswered, pause)

    async def request(self, batch: list[Waiting]) -> float:
        """Send a batch and set its results. Returns the seconds to wait before unanswered calls are sent again."""
        body = dumps({"calls": [work_to_dict(item.work) for item in batch]})
        headers = self._headers()
        async with self.http.stream("POST", f"{self.url}/calls", content=body, headers=headers) as response:
            if response.status_code != 200:
                return refused(self.url, response, await response.aread())
            async for line in response.aiter_lines():
                with readable_line():
                    data = json.loads(line)
                    item, result = batch[data.pop("index")], result_from_dict(data)
                self.give(item, result)
        return 0.0

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
                last = item.last or failure(Outcome.QUEUE_TIMEOUT, f"{self.url} was busy until the deadline")
                item.future.set_result(last)
        await asyncio.sleep(pause)
        for item in unanswered:
            if not item.future.done():
                self.enqueue(item)


@contextmanager
def readable_line() -> Iterator[None]:
    """Raise httpx.RemoteProtocolError, a failure of the infrastructure, for a line of another form than that of a service."""
    try:
        yield
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise httpx.RemoteProtocolError(f"not an answer of a sandbox service ({type(error).__name__})") from error


def refused(url: str, response: httpx.Response, body: bytes) -> float:
    """Return the seconds to wait before a refused request is sent again, or raise the error for the caller."""
    status = response.status_code
    if status in (429, 503):
        return retry_after(response)
    detail = error_detail(body)
    if status == 401:
        raise UserError(
            f"{url}: wrong token, or none; set RSTAR_LAB_SANDBOX_TOKEN or pass `token` to SandboxClient. The token file of a "
            "service is found only by the user who started it"
        )
    if status in (400, 413, 415, 422):
        raise ValueError(f"{url}: {detail}")
    if status == 404:
        raise UserError(
            f"{url}: no sandbox service (POST /calls returned 404); start one with `rstar-lab sandbox serve`"
        )
    raise httpx.HTTPStatusError(f"{status}: {detail}", request=response.request, response=response)


def retry_after(response: httpx.Response) -> float:
    try:
        return min(60.0, max(0.0, float(response.headers.get("Retry-After", 1))))
    except ValueError:
        return 1.0


def error_detail(body: bytes) -> str:
    try:
        detail: Any = json.loads(body)["detail"]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
    if isinstance(detail, list):
        return "; ".join(f"{'.'.join(map(str, item.get('loc', [])))}: {item.get('msg', '')}" for item in detail)
    return str(detail)
