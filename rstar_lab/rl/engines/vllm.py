"""The parent's side of a vLLM process: starts it, talks to it, starts it anew when it dies."""

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.rl.engine import Completion, EngineError, FinishReason, RequestRefused, Sampling

Request = tuple[int, list[int], Sampling]


class _Forked:
    """A process that another engine's made: its end is known by its pidfd, where a number could be another's by then."""

    def __init__(self, pid: int):
        self.pid, self._fd = pid, os.pidfd_open(pid)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def wait(self) -> None:
        select.select([self._fd], [], [])
        os.close(self._fd)


class VllmEngine:
    """One vLLM in one process.

    A dead or hung process is started again with the newest weights, and the requests it held are sent again: with seeds
    they give the same tokens, so nothing is lost or counted twice.

    stall_s: silence after which a busy process counts as hung.
    """

    def __init__(
        self,
        *,
        name: str = "vllm-0",
        env: dict[str, str] | None = None,
        log: Path | None = None,
        stall_s: float = 300.0,
        max_restarts: int = 3,
    ):
        self.name, self.log, self.stall_s, self.restarts_left = name, log, stall_s, max_restarts
        self.env = env or {}
        self._ids = count()
        self._pending: dict[int, tuple[Request, asyncio.Future[Completion]]] = {}
        self._weights: tuple[str, int] | None = None
        self._weights_loaded: asyncio.Future[None] | None = None
        self._process: subprocess.Popen[bytes] | _Forked | None = None
        self._life: int | None = None
        self._closed = False
        self._heard = time.monotonic()

    # Life of the process

    def spawn(self, others: Sequence["VllmEngine"] = ()) -> None:
        """Start the process and return at once: it imports vLLM meanwhile.

        others: engines with the same environment. Their processes fork from this one, for which the import is made once;
        after that no process needs another.
        """
        seats = [engine._take_seat() for engine in (self, *others)]
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **self.env,
        }
        fds = [fd for *fds, _ in seats for fd in fds]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rstar_lab.rl.engines.vllm_worker", json.dumps(seats)],
                pass_fds=fds,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=seats[0][2],
                stderr=seats[0][2],
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        finally:
            for fd in fds:
                os.close(fd)

    def _take_seat(self) -> tuple[int, int, int, str]:
        """What a process needs to be this engine: a socket, a pipe that closes with us, its log, a folder for its sockets."""
        ours, theirs = socket.socketpair()
        life, self._life = os.pipe()
        self._connection = Connection(ours.detach())
        # vLLM leaves its sockets where it made them.
        self._sockets = tempfile.TemporaryDirectory(prefix="rstar-vllm-", ignore_cleanup_errors=True)
        log = os.open(self.log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return theirs.detach(), life, log, self._sockets.name

    async def start(self, model: Path | str, options: dict[str, Any]) -> None:
        """Give the process its model and wait until it serves. Raises UserError where it cannot load it.

        options: keyword arguments of `vllm.LLM`.
        """
        if self._life is None:
            self.spawn()
        self.model, self.options = str(model), options
        self._send((self.model, self.options))
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(None, self._receive)
        if answer and answer[0] == "hello":
            self._process = self._process or _Forked(answer[1])
            answer = await loop.run_in_executor(None, self._receive)
        if answer is None or answer[0] == "failed":
            await self.aclose()
            where = f" (log: {self.log})" if self.log else ""
            raise UserError(f"engine: vLLM could not load {self.model}: {answer[1] if answer else 'it died'}{where}")
        self.kv_tokens: int = answer[1]
        self._loop = loop
        self._heard = time.monotonic()
        threading.Thread(target=self._read, args=(self._connection,), daemon=True).start()
        self._watchdog = loop.create_task(self._watch())

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None

    def _read(self, connection: Connection) -> None:
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                message = ("died",)
            try:
                self._loop.call_soon_threadsafe(self._handle, message, connection)
            except RuntimeError:  # the loop is closed
                return
            if message[0] == "died":
                return

    def _handle(self, message: Any, connection: Connection) -> None:
        if connection is not self._connection:
            return  # a process that was given up
        self._heard = time.monotonic()
        match message:
            case ("done", results):
                for request_id, token_ids, log_probs, reason, version in results:
                    _, future = self._pending.pop(request_id, (None, None))
                    if future and not future.done():
                        future.set_result(Completion(token_ids, log_probs, FinishReason(reason), self.name, version))
            case ("refused", request_id, text):
                _, future = self._pending.pop(request_id)
                if not future.done():
                    future.set_exception(RequestRefused(f"{self.name} refused a request: {text}"))
            case ("weights", _):
                if self._weights_loaded and not self._weights_loaded.done():
                    self._weights_loaded.set_result(None)
            case ("died",) if not self._closed:
                self._revive_task = self._loop.create_task(self._revive())

    async def _watch(self) -> None:
        while not self._closed:
            await asyncio.sleep(min(5.0, self.stall_s / 4))
            busy = self._pending or (self._weights_loaded and not self._weights_loaded.done())
            if not busy:
                self._heard = time.monotonic()
            elif time.monotonic() - self._heard > self.stall_s and self._process:
                self._heard = time.monotonic()
                self._process.kill()  # the reader sees the end of the connection and revives it

    async def _revive(self) -> None:
        self._reap()
        if self.restarts_left <= 0:
            error = EngineError(f"{self.name} died too often{f'; its log is {self.log}' if self.log else ''}")
            self._fail(error)
            return
        self.restarts_left -= 1
        self._watchdog.cancel()
        try:
            await self.start(self.model, self.options)
        except UserError as error:
            self._fail(EngineError(str(error)))
            return
        if self._weights:
            self._send(("weights", *self._weights))
        if self._pending:
            self._send(("generate", [request for request, _ in self._pending.values()]))

    def _fail(self, error: EngineError) -> None:
        waiting: list[asyncio.Future[Any]] = [future for _, future in self._pending.values()]
        self._pending.clear()
        if self._weights_loaded:
            waiting.append(self._weights_loaded)
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            pass  # the reader notices the death and sends everything pending again

    def _reap(self) -> None:
        if self._life is None:
            return
        os.close(self._life)  # what has no process yet will not get one
        self._life = None
        self._connection.close()
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._sockets.cleanup()

    async def aclose(self) -> None:
        """End the process. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "_watchdog"):
            self._watchdog.cancel()
        self._reap()
        self._fail(EngineError(f"{self.name} was closed"))

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    # Work

    def submit(self, requests: Iterable[tuple[list[int], Sampling]]) -> list[asyncio.Future[Completion]]:
        """Hand over several requests at once; they enter the engine's batch together."""
        batch: list[Request] = []
        futures = []
        for prompt_ids, sampling in requests:
            request = (next(self._ids), prompt_ids, sampling)
            future: asyncio.Future[Completion] = self._loop.create_future()
            self._pending[request[0]] = (request, future)
            batch.append(request)
            futures.append(future)
        self._send(("generate", batch))
        return futures

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Sample one completion. A cancelled call is aborted in the engine. Raises EngineError."""
        (future,) = self.submit([(prompt_ids, sampling)])
        request_id = next(reversed(self._pending))
        try:
            return await future
        finally:
            if self._pending.pop(request_id, None):
                self._send(("abort", [request_id]))

    def interrupt(self) -> None:
        """End every request with the tokens that it has, as FinishReason.ABORTED."""
        self._send(("interrupt",))

    async def load_weights(self, path: Path | str, version: int) -> None:
        """Load a safetensors file of the whole model and forget every cached prefix. Raises EngineError."""
        self._weights = (str(path), version)
        self._weights_loaded = self._loop.create_future()
        self._send(("weights", *self._weights))
        await self._weights_loaded
