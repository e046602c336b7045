"""Starts and stops the processes of `rstar-lab sandbox serve` and `worker`, whose backend runs code on this machine."""

import asyncio
import contextlib
import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
import uvloop

from rstar_lab.common.outcomes import Outcome
from rstar_lab.common.service_tokens import published_token
from rstar_lab.hardware.limits import raise_open_files
from rstar_lab.sandbox.access import LOOPBACK, check_exposure, listen
from rstar_lab.sandbox.call import CallResult, OnOutput
from rstar_lab.sandbox.http_limits import http_limits
from rstar_lab.sandbox.limits import Limits
from rstar_lab.sandbox.local import LocalSandbox
from rstar_lab.sandbox.server import make_app
from rstar_lab.sandbox.service import Service
from rstar_lab.sandbox.wire import SessionEnd, SessionFork, Verification, Work
from rstar_lab.verify import verify

log = logging.getLogger(__name__)


class LocalBackend:
    """Backend that runs code in a LocalSandbox, and verifies answers in threads."""

    def __init__(self, sandbox: LocalSandbox) -> None:
        self.sandbox = sandbox
        self.workers = sandbox.workers
        # Calls that a worker takes from Redis at once: enough to keep all cores busy, few enough to share the load.
        self.prefetch_limit = 4 * self.workers + 8
        self.verifiers = ThreadPoolExecutor(max(4, self.workers), thread_name_prefix="verify")

    async def start(self) -> "LocalBackend":
        await self.sandbox.start()
        return self

    async def aclose(self) -> None:
        await self.sandbox.aclose()
        self.verifiers.shutdown(wait=False, cancel_futures=True)

    @property
    def gauges(self) -> dict[str, int]:
        return self.sandbox.gauges

    async def run(self, work: Work, on_output: OnOutput | None = None) -> CallResult:
        if isinstance(work, Verification):
            return await self.verify(work)
        if isinstance(work, SessionEnd):
            await self.sandbox.close_session(work.session)
            return CallResult(Outcome.OK, "", "", None, 0.0)
        if isinstance(work, SessionFork):
            names = await self.sandbox.fork(work.session, work.n)
            return CallResult(Outcome.OK, "", "", json.dumps(names), 0.0)
        return await self.sandbox.run_call(work, on_output)

    async def verify(self, work: Verification) -> CallResult:
        requested = time.monotonic()

        def timed() -> CallResult:
            started = time.monotonic()
            right = verify(work.response_text, work.answer)
            return CallResult(Outcome.OK, "", "", str(right), time.monotonic() - started, started - requested)

        return await asyncio.get_running_loop().run_in_executor(self.verifiers, timed)


# Bytes of all unanswered requests and unread responses.
MAX_QUEUED_BYTES = 512 * 1024**2

Announce = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of `sandbox serve` and `sandbox worker`, named as in cli/sandbox.py.

    own_token: make a token if there is no `token` (service_tokens.py). The last five are those of `serve` alone.
    """

    workers: int | None
    time_limit_s: float
    memory_mb: int
    queue_timeout_s: float
    drain_s: float
    strict: bool
    redis: str | None
    readable: Sequence[Path] | None
    isolation: str
    preload: Sequence[str] | None
    host: str = ""
    port: int = 0
    max_queue: int = 0
    token: str | None = None
    own_token: bool = False


class DrainingServer(uvicorn.Server):
    """Server that answers all accepted calls after SIGTERM or SIGINT before it closes the connections.

    drain_s: seconds that running calls may continue. announce: called when the server listens. A second SIGINT ends it at once.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: float, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self.service = service
        self.drain_s = drain_s
        self.announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.handle_exit)
        self.announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not that of uvicorn, which raises the signal again at the end.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.create_task(self.service.drain(self.drain_s))
        await super().shutdown(sockets)
        drain.cancel()


def prepare() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    raise_open_files()


def run_server(options: Options, announce: Announce) -> None:
    """Run the service until SIGTERM or SIGINT. announce: called with the ready message. Raises UserError for invalid options."""
    check_exposure(options.host, options.token)
    listener = listen(options.host, options.port)
    prepare()
    with contextlib.ExitStack() as stack:
        token_file = None
        if options.own_token and not options.token:
            token, path = stack.enter_context(published_token(options.host, listener.getsockname()[1]))
            options, token_file = replace(options, token=token), str(path)
        uvloop.run(serve(options, listener, lambda ready: announce({**ready, "token_file": token_file})))


async def serve(options: Options, listener: socket.socket, announce: Announce) -> None:
    if options.redis:
        from rstar_lab.sandbox.redis_backend import RedisBackend

        backend: Any = await RedisBackend(options.redis, wait_s=options.queue_timeout_s).start()
    else:
        backend = await local_backend(options)
    service = Service(backend, max_calls=options.max_queue, max_bytes=MAX_QUEUED_BYTES)
    loopback_only = options.host in LOOPBACK
    app = make_app(service, time_limit_s=options.time_limit_s, token=options.token, loopback_only=loopback_only)
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=4096,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(options.drain_s) + 5,
        **http_limits(),
    )
    host, port = listener.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    ready = {"url": f"http://{name}:{port}", "workers": backend.gauges["workers"]}
    try:
        await DrainingServer(config, service, options.drain_s, lambda: announce(ready)).serve(sockets=[listener])
    finally:
        await backend.aclose()


async def local_backend(options: Options) -> LocalBackend:
    limits = Limits(options.time_limit_s, memory_mb=options.memory_mb, queue_timeout_s=options.queue_timeout_s)
    sandbox = LocalSandbox(
        limits,
        options.workers,
        strict=options.strict,
        readable=options.readable or (),
        isolation=options.isolation,
        preload=options.preload or (),
    )
    return await LocalBackend(sandbox).start()


def run_worker(options: Options, announce: Announce) -> None:
    """Run a worker until SIGTERM or SIGINT. announce: called with the ready message. Raises UserError for invalid options."""
    prepare()
    uvloop.run(work(options, announce))


async def work(options: Options, announce: Announce) -> None:
    from rstar_lab.sandbox.worker import Worker

    assert options.redis is not None
    backend = await local_backend(options)
    try:
        worker = Worker(options.redis, backend, drain_s=options.drain_s)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, worker.stopping.set)
        await worker.serve(lambda: announce({"worker": worker.name, "workers": backend.workers}))
    finally:
        await backend.aclose()
