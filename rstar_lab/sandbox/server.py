"""The HTTP service: /calls, files of sessions, code-judge's API and SandboxFusion's /run_code over one Service."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import code_judge, sandbox_fusion
from rstar_lab.sandbox.access import AccessMiddleware
from rstar_lab.sandbox.call import FORBID, OutputDecoder, failure
from rstar_lab.sandbox.limits import MAX_STDIN_BYTES, MAX_TIMEOUT_S
from rstar_lab.sandbox.service import Service
from rstar_lab.sandbox.wire import MAX_BATCH, Work, dumps

T = TypeVar("T")

# JSON bytes of the outputs in one response; a streamed response counts only bytes that are not sent yet. Results beyond this
# limit have no output.
MAX_RESPONSE_BYTES = 64 * 1024 * 1024
MAX_BODY = MAX_STDIN_BYTES + 64 * 1024 * 1024
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "not JSON, or not addressed to this service"},
    401: {"description": "the bearer token is missing or wrong"},
    413: {"description": "the request is too large"},
    415: {"description": "the request is not application/json"},
    422: {"description": "a field is invalid; the response names it"},
    429: {"description": "the queue is full: try again after Retry-After seconds"},
    503: {"description": "the service is stopping: try again elsewhere, or after Retry-After seconds"},
}


class Calls(BaseModel):
    """Request body of POST /calls."""

    model_config = FORBID
    calls: list[Work] = Field(min_length=1, max_length=MAX_BATCH)
    stream: bool = Field(False, description="send output while the calls run")


def example_request(url: str, token: str = "") -> str:
    """Return a curl command that runs a program. token: text of the shell for the token; empty: the service needs none."""
    header = f'-H "Authorization: Bearer {token}" ' if token else ""
    body = json.dumps({"type": "python", "solution": "print(6 * 7)"})
    return f"curl {url}/run {header}-H 'Content-Type: application/json' -d '{body}'"


def make_app(
    service: Service, *, time_limit_s: float, token: str | None = None, loopback_only: bool = False
) -> FastAPI:
    """Return the application. The backend of `service` must be started.

    time_limit_s: time limit of C++ programs, without compilation (the limit of Python programs is set in the backend).
    token: required bearer token. loopback_only: the service listens on loopback.
    """

    app = FastAPI(
        title="rstar_lab sandbox",
        description="Runs model-written code. `/run` and `/judge` as code-judge, `/run_code` as SandboxFusion.",
        responses=ERRORS,
    )
    app.add_middleware(AccessMiddleware, token=token, max_body=MAX_BODY, loopback_only=loopback_only, service=service)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        # Without the input, which can be large or not representable in JSON.
        detail = [{key: item[key] for key in ("type", "loc", "msg")} for item in error.errors()[:20]]
        return JSONResponse({"detail": detail, "help": "GET / shows a request that works"}, status_code=422)

    async def admitted(request: Request, calls: int, run: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `run` once the queue has room for its calls. Raises BusyError."""
        service.admit(calls)
        try:
            return await while_connected(request, run())
        finally:
            service.release(calls)

    def reply(content: dict[str, Any]) -> Response:
        return CountedResponse(service, dumps(content))

    async def submit(
        request: Request, submissions: list[code_judge.Submission], *, outputs: bool
    ) -> list[dict[str, Any]]:
        """Run submissions; return results in order. outputs: whether they contain stdout and stderr."""
        left = MAX_RESPONSE_BYTES

        async def run_one(submission: code_judge.Submission) -> dict[str, Any]:
            nonlocal left
            try:
                result = await service.run(code_judge.to_work(submission, time_limit_s))
            except ValueError as error:
                result = failure(Outcome.INVALID_ARGUMENTS, str(error))
            row = code_judge.to_result(submission, result).model_dump(mode="json")
            size = sum(json_size(row[name]) for name in ("stdout", "stderr", "value") if row[name])
            if not outputs:
                del row["stdout"], row["stderr"]
            elif size > left:
                note = (
                    f"[output left out: the response is limited to {MAX_RESPONSE_BYTES} bytes; send smaller batches]\n"
                )
                row |= {"stdout": "", "stderr": note, "value": None}
            else:
                left -= size
            return row

        return await admitted(request, len(submissions), lambda: asyncio.gather(*map(run_one, submissions)))

    @app.get("/", tags=["operation"])
    async def welcome(request: Request) -> dict[str, str]:
        """Say what the service is, and how to send it a program."""
        host, port = request.scope["server"]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return {
            "service": "rstar_lab sandbox: runs Python and C++ programs that a model wrote",
            "try": example_request(address, "TOKEN" if token else ""),
            "api": f"{address}/openapi.json, with the token",
        }

    @app.get("/ping", tags=["code-judge"])
    async def ping() -> str:
        return "pong"

    @app.get("/status", tags=["code-judge"], response_model=code_judge.Status)
    async def status() -> Response:
        gauges = service.backend.gauges
        return reply({"queue": gauges["queue_depth"], "num_workers": gauges["workers"]})

    def add_code_judge(path: str, *, outputs: bool) -> None:
        @app.post(path, tags=["code-judge"], response_model=code_judge.SubmissionResult)
        async def one(request: Request, submission: code_judge.Submission) -> Response:
            return reply((await submit(request, [submission], outputs=outputs))[0])

        # code-judge limits how long a short batch waits; here both kinds of batch wait for the queue.
        @app.post(f"{path}/batch", tags=["code-judge"], response_model=code_judge.BatchResult)
        @app.post(f"{path}/long-batch", tags=["code-judge"], response_model=code_judge.BatchResult)
        async def batch(request: Request, batch: code_judge.BatchSubmission) -> Response:
            return reply({"sub_id": batch.sub_id, "results": await submit(request, batch.submissions, outputs=outputs)})

    add_code_judge("/run", outputs=True)
    add_code_judge("/judge", outputs=False)

    @app.post("/run_code", tags=["SandboxFusion"], response_model=sandbox_fusion.RunCodeResponse)
    async def run_code(request: Request, body: sandbox_fusion.RunCodeRequest) -> Response:
        try:
            call = sandbox_fusion.to_call(body, MAX_TIMEOUT_S)
            result = await admitted(request, 1, lambda: service.run(call))
        except ValueError as error:
            result = failure(Outcome.INVALID_ARGUMENTS, str(error))
        return reply(sandbox_fusion.to_response(body, result).model_dump(mode="json"))

    @app.post("/calls", tags=["calls"], response_class=StreamingResponse)
    async def calls(body: Calls) -> Response:
        """Run calls. The response has one line of JSON for each call, in the order in which they finish:
        `{"index", "outcome", "stdout", "stderr", "value", "duration_s", "queue_s"}`. With `stream`, lines with the output since the
        previous one, `{"index", "stream", "text"}`, come before it."""
        service.admit(len(body.calls))
        lines = result_lines(service, body.calls, stream=body.stream)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    return app


async def result_lines(service: Service, work: list[Work], *, stream: bool = False) -> AsyncIterator[bytes]:
    """Yield the body of a response to /calls; then release the calls, which were admitted.

    stream: send the output of the calls while they run.
    """
    done: asyncio.Queue[bytes] = asyncio.Queue()
    unsent = unfinished = 0

    def put(content: dict[str, Any], *, always: bool = False) -> bool:
        """Send a line. Returns False if too many bytes are not read yet."""
        nonlocal unsent
        line = dumps(content) + b"\n"
        if not always and (unsent + len(line) > MAX_RESPONSE_BYTES or not service.has_room(len(line))):
            return False
        unsent += len(line)
        service.hold_bytes(len(line))
        done.put_nowait(line)
        return True

    async def run_one(index: int, item: Work) -> None:
        nonlocal unfinished
        decoder = OutputDecoder()

        def send(number: int, data: bytes) -> None:  # without room, the output is only in the result
            put({"index": index, **asdict(decoder.decode(number, data))})

        result = await service.run(item, send if stream else None)
        sent = put({"index": index, **asdict(result)})
        unfinished -= 1
        if not sent:
            note = (
                f"[output left out: {unsent} bytes of results are not read yet; read faster or send smaller batches]\n"
            )
            put({"index": index, **asdict(replace(result, stdout="", stderr=note, value=None))}, always=True)

    unfinished = len(work)
    tasks = [asyncio.create_task(run_one(index, item)) for index, item in enumerate(work)]
    try:
        while unfinished or not done.empty():
            lines = [await done.get()]
            while not done.empty():
                lines.append(done.get_nowait())
            body = b"".join(lines)
            yield body
            unsent -= len(body)
            service.hold_bytes(-len(body))
    finally:
        for task in tasks:
            task.cancel()
        service.hold_bytes(-unsent)
        unsent = 0
        service.release(len(work))


def json_size(text: str) -> int:
    """Estimate the bytes of a text in JSON: 2 per character of ASCII text, else 6 per character."""
    return 2 * len(text) if text.isascii() else 6 * len(text)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel it."""
    running = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({running, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise HTTPException(499, "the client has disconnected")
        return running.result()
    finally:
        for future in (running, disconnected):
            future.cancel()
            # Otherwise asyncio logs the exception of a cancelled `gather` as an error.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())


class CountedResponse(Response):
    """A JSON response whose bytes count as held until it is sent. Raises BusyError if the service holds too many."""

    media_type = "application/json"

    def __init__(self, service: Service, body: bytes) -> None:
        super().__init__(body)
        self._service = service
        service.reserve_bytes(len(body))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._service.hold_bytes(-len(self.body))
