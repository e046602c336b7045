"""The HTTP service: our own calls, code-judge's API and SandboxFusion's /run_code over one Service."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from rstar_lab.outcomes import Outcome
from rstar_lab.sandbox import code_judge, sandbox_fusion
from rstar_lab.sandbox.access import AccessMiddleware
from rstar_lab.sandbox.call import CallResult
from rstar_lab.sandbox.files import run_with_files
from rstar_lab.sandbox.limits import MAX_STDIN_BYTES, MAX_TIMEOUT_S
from rstar_lab.sandbox.metrics import CONTENT_TYPE
from rstar_lab.sandbox.service import BusyError, Service
from rstar_lab.sandbox.wire import Work, WorkModel, dumps, failure, result_to_dict

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BATCH = 4096
MAX_BODY = MAX_STDIN_BYTES + 64 * 1024 * 1024
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "not JSON, or not addressed to this service"},
    401: {"description": "the bearer token is missing or wrong"},
    413: {"description": "the request is too large"},
    415: {"description": "the request is not application/json"},
    422: {"description": "a field is wrong; the answer names it"},
    429: {"description": "the queue is full: try again after Retry-After seconds"},
    503: {"description": "the service is stopping: try again elsewhere, or after Retry-After seconds"},
}


class Calls(BaseModel):
    """Work for POST /calls. A result comes as soon as it is there, with the index of its call."""

    model_config = ConfigDict(extra="forbid")

    calls: list[WorkModel] = Field(min_length=1, max_length=MAX_BATCH)


class GoneError(Exception):
    """The client has hung up."""


def make_app(
    service: Service,
    *,
    time_limit_s: float,
    token: str | None = None,
    loopback_only: bool = False,
    max_body: int = MAX_BODY,
) -> FastAPI:
    """The application. time_limit_s: of a C++ program without its compilation (the backend knows that of Python).

    The backend must have been started; it is closed when the application ends.
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
    app.add_middleware(AccessMiddleware, token=token, max_body=max_body, loopback_only=loopback_only)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        # Without the input: it may be large, or hold what JSON cannot.
        detail = [{key: item[key] for key in ("type", "loc", "msg")} for item in error.errors()[:20]]
        return JSONResponse({"detail": detail}, status_code=422)

    @app.exception_handler(BusyError)
    async def busy(_: Request, error: BusyError) -> Response:
        status = 503 if service.draining else 429
        return JSONResponse({"detail": str(error)}, status, headers={"Retry-After": str(error.retry_after_s)})

    @app.exception_handler(GoneError)
    async def gone(_: Request, __: GoneError) -> Response:
        return Response(status_code=499)

    async def answer_all(request: Request, work: list[Work | CallResult]) -> list[CallResult]:
        """Results in order; what is a result already stays."""

        def begin() -> Awaitable[list[CallResult]]:
            return gather(item if isinstance(item, CallResult) else service.run(item) for item in work)

        return await admitted(request, len(work), begin)

    async def admitted(request: Request, calls: int, begin: Callable[[], Awaitable[T]]) -> T:
        """What `begin` gives, once there is room for so many calls."""
        size = int(request.headers.get("content-length", 0))
        service.admit(calls, size)
        try:
            return await while_connected(request, begin())
        finally:
            service.release(calls, size)

    def planned(submission: code_judge.Submission) -> Work | CallResult:
        try:
            return code_judge.to_work(submission, time_limit_s)
        except ValueError as error:
            return failure(Outcome.INVALID_ARGUMENTS, str(error))

    async def submit(request: Request, submissions: list[code_judge.Submission]) -> list[code_judge.SubmissionResult]:
        results = await answer_all(request, [planned(submission) for submission in submissions])
        return [code_judge.to_result(*pair) for pair in zip(submissions, results, strict=True)]

    @app.get("/ping", tags=["code-judge"])
    async def ping() -> str:
        return "pong"

    @app.get("/status", tags=["code-judge"], response_model=code_judge.Status)
    async def status() -> Response:
        backend = service.backend
        return as_json(code_judge.Status(queue=backend.queued, num_workers=backend.capacity))

    @app.post("/run", tags=["code-judge"], response_model=code_judge.SubmissionResult)
    async def run(request: Request, submission: code_judge.Submission) -> Response:
        return as_json((await submit(request, [submission]))[0])

    @app.post("/judge", tags=["code-judge"], response_model=code_judge.JudgeResult)
    async def judge(request: Request, submission: code_judge.Submission) -> Response:
        return as_json((await submit(request, [submission]))[0], hide={"stdout", "stderr"})

    # Here a short batch is as safe as a long one: both wait for the queue.
    @app.post("/run/batch", tags=["code-judge"], response_model=code_judge.BatchSubmissionResult)
    @app.post("/run/long-batch", tags=["code-judge"], response_model=code_judge.BatchSubmissionResult)
    async def run_batch(request: Request, batch: code_judge.BatchSubmission) -> Response:
        results = await submit(request, batch.submissions)
        return as_json(code_judge.BatchSubmissionResult(sub_id=batch.sub_id or "", results=results))

    @app.post("/judge/batch", tags=["code-judge"], response_model=code_judge.BatchJudgeResult)
    @app.post("/judge/long-batch", tags=["code-judge"], response_model=code_judge.BatchJudgeResult)
    async def judge_batch(request: Request, batch: code_judge.BatchSubmission) -> Response:
        results = await submit(request, batch.submissions)
        hidden = {"results": {"__all__": {"stdout", "stderr"}}}
        return as_json(code_judge.BatchSubmissionResult(sub_id=batch.sub_id or "", results=results), hide=hidden)

    @app.post("/run_code", tags=["SandboxFusion"], response_model=sandbox_fusion.RunCodeResponse)
    async def run_code(request: Request, body: sandbox_fusion.RunCodeRequest) -> Response:
        try:
            call = sandbox_fusion.to_call(body, MAX_TIMEOUT_S)
            staged = await admitted(request, 1, lambda: run_with_files(service.run, call, body.files, body.fetch_files))
        except ValueError as error:
            return as_json(sandbox_fusion.refused(str(error)))
        return as_json(sandbox_fusion.to_response(body, staged))

    @app.post("/calls", tags=["calls"], response_class=StreamingResponse)
    async def calls(request: Request, body: Calls) -> Response:
        """One JSON object a line for each call, in the order in which they are done:
        `{"index", "outcome", "stdout", "stderr", "value", "duration_s", "queue_s"}`."""
        work = [model.work() for model in body.calls]
        size = int(request.headers.get("content-length", 0))
        service.admit(len(work), size)
        return StreamingResponse(result_lines(service, work, size), media_type="application/x-ndjson")

    @app.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE)

    return app


async def result_lines(service: Service, work: list[Work], size: int) -> AsyncIterator[bytes]:
    """The body of an answer to /calls. Takes over the room that was admitted."""
    done: asyncio.Queue[bytes] = asyncio.Queue()

    async def one(index: int, item: Work) -> None:
        result = await service.run(item)
        done.put_nowait(dumps({"index": index, **result_to_dict(result)}) + b"\n")

    tasks = [asyncio.create_task(one(index, item)) for index, item in enumerate(work)]
    try:
        left = len(tasks)
        while left:
            lines = [await done.get()]
            while not done.empty():
                lines.append(done.get_nowait())
            left -= len(lines)
            yield b"".join(lines)
    finally:
        for task in tasks:
            task.cancel()
        service.release(len(work), size)


async def gather(work: Any) -> list[CallResult]:
    """Results in order. If cancelled, so is everything that still runs."""
    work = list(work)
    running = [item for item in work if not isinstance(item, CallResult)]
    results = iter(await asyncio.gather(*running))
    return [item if isinstance(item, CallResult) else next(results) for item in work]


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is given up when the client hangs up: nobody wants it any more.

    Raises GoneError then.
    """
    running = asyncio.ensure_future(work)
    hung_up = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({running, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise GoneError
        return running.result()
    finally:
        running.cancel()
        hung_up.cancel()


def as_json(model: BaseModel, hide: Any = None) -> Response:
    return Response(dumps(model.model_dump(mode="json", exclude=hide)), media_type="application/json")
