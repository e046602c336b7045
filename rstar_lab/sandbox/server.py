"""The HTTP service: /calls, files of sessions, code-judge's API and SandboxFusion's /run_code over one Service."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Base64Bytes, BaseModel, Field
from starlette.types import Receive, Scope, Send

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.sandbox import code_judge, sandbox_fusion
from rstar_lab.sandbox.access import CONTENT_TYPE, AccessMiddleware, BusyError
from rstar_lab.sandbox.call import Call, CallResult, OnOutput, OutputDecoder
from rstar_lab.sandbox.files import run_with_files
from rstar_lab.sandbox.limits import MAX_STDIN_BYTES, MAX_TIMEOUT_S
from rstar_lab.sandbox.service import Service
from rstar_lab.sandbox.session_files import SessionFileError, SessionFiles
from rstar_lab.sandbox.wire import MAX_BATCH, Body, Work, WorkModel, dumps, failure, result_to_dict

log = logging.getLogger(__name__)
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


SESSION = Field(min_length=1, max_length=256, description="name of the session; it is started if it does not exist")


class Calls(Body):
    """Request body of POST /calls."""

    calls: list[WorkModel] = Field(min_length=1, max_length=MAX_BATCH)


class FilesToWrite(Body):
    """Request body of POST /files/write."""

    session: str = SESSION
    files: dict[str, Base64Bytes] = Field(min_length=1, max_length=MAX_BATCH, description="path -> base64 content")


class FileToRead(Body):
    """Request body of POST /files/read."""

    session: str = SESSION
    path: str


class ServiceFiles(SessionFiles):
    """Files of the sessions of a service."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def run_call(self, call: Call) -> CallResult:
        return await self.service.run(call)


def example_request(url: str, token: str = "") -> str:
    """Return a curl command that runs a program. token: text of the shell for the token; empty: the service needs none."""
    header = f'-H "Authorization: Bearer {token}" ' if token else ""
    body = json.dumps({"type": "python", "solution": "print(6 * 7)"})
    return f"curl {url}/run {header}-H 'Content-Type: application/json' -d '{body}'"


class GoneError(Exception):
    """The client has disconnected."""


def make_app(
    service: Service,
    *,
    time_limit_s: float,
    token: str | None = None,
    loopback_only: bool = False,
    max_body: int = MAX_BODY,
) -> FastAPI:
    """Return the application. The backend of `service` must be started; the application closes it at the end.

    time_limit_s: time limit of C++ programs, without compilation (the limit of Python programs is set in the backend).
    token: required bearer token. loopback_only: the service listens on loopback. max_body: largest request body in bytes.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await service.backend.aclose()

    app = FastAPI(
        title="rstar_lab sandbox",
        description="Runs model-written code. `/run` and `/judge` as code-judge, `/run_code` as SandboxFusion.",
        lifespan=lifespan,
        responses=ERRORS,
    )
    app.add_middleware(AccessMiddleware, token=token, max_body=max_body, loopback_only=loopback_only, budget=service)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        # Without the input, which can be large or not representable in JSON.
        detail = [{key: item[key] for key in ("type", "loc", "msg")} for item in error.errors()[:20]]
        return JSONResponse({"detail": detail, "help": "GET / shows a request that works"}, status_code=422)

    @app.exception_handler(BusyError)
    async def busy(_: Request, error: BusyError) -> Response:
        return JSONResponse({"detail": str(error)}, error.status, headers={"Retry-After": str(error.retry_after_s)})

    @app.exception_handler(SessionFileError)
    async def file_error(_: Request, error: SessionFileError) -> Response:
        return JSONResponse({"detail": str(error)}, 503 if error.outcome in INFRASTRUCTURE_FAILURES else 422)

    @app.exception_handler(GoneError)
    async def gone(_: Request, __: GoneError) -> Response:
        return Response(status_code=499)

    async def admitted(request: Request, calls: int, run: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `run` once the queue has room for its calls. Raises BusyError or GoneError."""
        service.admit(calls)
        try:
            return await while_connected(request, run())
        finally:
            service.release(calls)

    def reply(model: BaseModel, hide: Any = None) -> Response:
        body = dumps(model.model_dump(mode="json", exclude=hide))
        return CountedResponse(service, body)

    async def submit(
        request: Request, submissions: list[code_judge.Submission], *, outputs: bool
    ) -> list[code_judge.SubmissionResult]:
        """Run submissions; return results in order. outputs: whether the response contains stdout and stderr."""
        budget = ResponseBudget(MAX_RESPONSE_BYTES if outputs else 0)

        async def run_one(submission: code_judge.Submission) -> code_judge.SubmissionResult:
            try:
                result = await service.run(code_judge.to_work(submission, time_limit_s))
            except ValueError as error:
                result = failure(Outcome.INVALID_ARGUMENTS, str(error))
            return budget.trim(code_judge.to_result(submission, result))

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
        backend = service.backend
        return reply(code_judge.Status(queue=backend.queued, num_workers=backend.capacity))

    @app.post("/run", tags=["code-judge"], response_model=code_judge.SubmissionResult)
    async def run(request: Request, submission: code_judge.Submission) -> Response:
        return reply((await submit(request, [submission], outputs=True))[0])

    @app.post("/judge", tags=["code-judge"], response_model=code_judge.JudgeResult)
    async def judge(request: Request, submission: code_judge.Submission) -> Response:
        return reply((await submit(request, [submission], outputs=False))[0], hide={"stdout", "stderr"})

    # code-judge limits how long a short batch waits; here both kinds of batch wait for the queue.
    @app.post("/run/batch", tags=["code-judge"], response_model=code_judge.BatchSubmissionResult)
    @app.post("/run/long-batch", tags=["code-judge"], response_model=code_judge.BatchSubmissionResult)
    async def run_batch(request: Request, batch: code_judge.BatchSubmission) -> Response:
        results = await submit(request, batch.submissions, outputs=True)
        return reply(code_judge.BatchSubmissionResult(sub_id=batch.sub_id or "", results=results))

    @app.post("/judge/batch", tags=["code-judge"], response_model=code_judge.BatchJudgeResult)
    @app.post("/judge/long-batch", tags=["code-judge"], response_model=code_judge.BatchJudgeResult)
    async def judge_batch(request: Request, batch: code_judge.BatchSubmission) -> Response:
        results = await submit(request, batch.submissions, outputs=False)
        hidden = {"results": {"__all__": {"stdout", "stderr"}}}
        return reply(code_judge.BatchSubmissionResult(sub_id=batch.sub_id or "", results=results), hide=hidden)

    @app.post("/run_code", tags=["SandboxFusion"], response_model=sandbox_fusion.RunCodeResponse)
    async def run_code(request: Request, body: sandbox_fusion.RunCodeRequest) -> Response:
        try:
            call = sandbox_fusion.to_call(body, MAX_TIMEOUT_S)
            staged = await admitted(request, 1, lambda: run_with_files(service.run, call, body.files, body.fetch_files))
        except ValueError as error:
            return reply(sandbox_fusion.refused(str(error)))
        return reply(sandbox_fusion.to_response(body, staged))

    @app.post("/calls", tags=["calls"], response_class=StreamingResponse)
    async def calls(body: Calls) -> Response:
        """Run calls. The response has one line of JSON for each call, in the order in which they finish:
        `{"index", "outcome", "stdout", "stderr", "value", "duration_s", "queue_s"}`. A call with `stream` has additional lines
        before that, `{"index", "stream", "text"}`, with the output since the previous line."""
        work = [model.work() for model in body.calls]
        streamed = {index for index, model in enumerate(body.calls) if getattr(model, "stream", False)}
        service.admit(len(work))
        lines = result_lines(service, work, streamed)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    @app.post("/files/write", tags=["files of sessions"], status_code=204)
    async def write_files(request: Request, body: FilesToWrite) -> None:
        """Write files of at most 48 MiB in a session. Paths are relative to its working folder; missing folders are created."""
        await admitted(request, len(body.files), lambda: ServiceFiles(service).write_files(body.session, body.files))

    @app.post(
        "/files/read",
        tags=["files of sessions"],
        response_class=StreamingResponse,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    async def read_file(request: Request, body: FileToRead) -> Response:
        """Return the content of a file of a session, at most 64 MiB."""
        chunks = file_chunks(service, body)
        first = await while_connected(request, anext(chunks))

        async def content() -> AsyncIterator[bytes]:
            async with aclosing(chunks):
                yield first
                async for chunk in chunks:
                    yield chunk

        return StreamingResponse(content(), media_type="application/octet-stream")

    @app.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE)

    return app


async def result_lines(service: Service, work: list[Work], streamed: Collection[int] = ()) -> AsyncIterator[bytes]:
    """Yield the body of a response to /calls; then release the calls, which were admitted.

    streamed: indices of the calls whose output is sent while they run.
    """
    done: asyncio.Queue[bytes] = asyncio.Queue()
    unsent = unfinished = 0

    def has_room(line: bytes) -> bool:
        return unsent + len(line) <= MAX_RESPONSE_BYTES and service.has_room(len(line))

    def put(line: bytes) -> None:
        nonlocal unsent
        unsent += len(line)
        service.hold_bytes(len(line))
        done.put_nowait(line)

    def output_sender(index: int) -> OnOutput:
        decoder = OutputDecoder()

        def send(number: int, data: bytes) -> None:
            line = dumps({"index": index, **asdict(decoder.decode(number, data))}) + b"\n"
            if has_room(line):  # if not, this output is only in the result
                put(line)

        return send

    async def run_one(index: int, item: Work) -> None:
        nonlocal unfinished
        result = await service.run(item, output_sender(index) if index in streamed else None)
        line = dumps({"index": index, **result_to_dict(result)}) + b"\n"
        if not has_room(line):
            note = (
                f"[output left out: {unsent} bytes of results are not read yet; read faster or send smaller batches]\n"
            )
            result = replace(result, stdout="", stderr=note, value=None)
            line = dumps({"index": index, **result_to_dict(result)}) + b"\n"
        unfinished -= 1
        put(line)

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
            service.release_bytes(len(body))
    finally:
        for task in tasks:
            task.cancel()
        service.release_bytes(unsent)
        unsent = 0
        service.release(len(work))


async def file_chunks(service: Service, file: FileToRead) -> AsyncGenerator[bytes, None]:
    """Yield the content of a file of a session. The request counts as one call in flight until the end."""
    service.admit(1)
    try:
        async for chunk in ServiceFiles(service).read_chunks(file.session, file.path):
            yield chunk
    finally:
        service.release(1)


class ResponseBudget:
    """Removes the output of results once a response has reached its limit in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = limit

    def trim(self, result: code_judge.SubmissionResult) -> code_judge.SubmissionResult:
        """Remove stdout, stderr and value of a result that does not fit. Its outcome stays."""
        size = sum(json_size(text) for text in (result.stdout, result.stderr, result.value) if text)
        if not self.limit or size <= self.left:
            self.left -= min(size, self.left)
            return result
        note = f"[output left out: the response is limited to {self.limit} bytes; send smaller batches]\n"
        return result.model_copy(update={"stdout": "", "stderr": note, "value": None})


def json_size(text: str) -> int:
    """Estimate the bytes of a text in JSON: 2 per character of ASCII text, else 6 per character."""
    return 2 * len(text) if text.isascii() else 6 * len(text)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel it and raise GoneError."""
    running = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({running, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise GoneError
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
            self._service.release_bytes(len(self.body))
