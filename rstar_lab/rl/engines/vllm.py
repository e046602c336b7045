"""The parent's side of a vLLM process: starts it, exchanges messages with it, and restarts it when it dies."""

import asyncio
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.common.temporary import LockedFolder
from rstar_lab.rl.engine import Completion, EngineError, FinishReason, RequestRefused, Sampling
from rstar_lab.rl.engines.devices import end_of_log

LOG = logging.getLogger(__name__)
MAX_RESTARTS = 3
NAMED_S = 30.0  # seconds after which a busy process that sends nothing is named
Request = tuple[int, list[int], Sampling]
WeightSource = tuple[str, Any]  # ("file", path) or ("tensors", (tensors, aliases, adapters)), which are sent pickled


class _ForkedProcess:
    """A process forked by another engine's process. A pidfd identifies it, because its pid may be reused after its end."""

    def __init__(self, pid: int):
        self.pid, self._fd = pid, os.pidfd_open(pid)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def wait(self) -> None:
        select.select([self._fd], [], [])
        os.close(self._fd)


def _receive(connection: Connection) -> Any:
    """Return the next message of a process, or ("died",) if it has ended."""
    with suppress(EOFError, OSError):
        return connection.recv()
    return ("died",)


class VllmEngine:
    """One vLLM engine in its own process.

    A process that died or hangs is restarted with the newest weights, and its unfinished requests are sent again. A
    request with a seed then returns the same tokens. A request that vLLM ends with an internal error is sent once more.
    After the last restart, unfinished and new requests raise EngineError.

    gpu: name of the engine's GPU, None on a CPU. stall_s: a busy process that sends nothing for this long counts as
    hung. Time in which the parent's event loop was blocked does not count.
    """

    def __init__(
        self,
        *,
        name: str = "vllm-0",
        env: dict[str, str] | None = None,
        log: Path | None = None,
        stall_s: float = 300.0,
        gpu: str | None = None,
    ):
        self.name, self.log, self.stall_s, self.restarts_left = name, log, stall_s, MAX_RESTARTS
        self.env, self.gpu = env or {}, gpu
        self._ids = count()
        self._pending: dict[int, tuple[Request, asyncio.Future[Completion]]] = {}
        self._retried: set[int] = set()
        self._in_transfer: WeightSource | None = None
        self._weights: tuple[Callable[[], WeightSource], int] | None = None
        self._weights_loaded: asyncio.Future[None] | None = None
        self._process: subprocess.Popen[bytes] | _ForkedProcess | None = None
        self._life: int | None = None
        self._closed = False
        self._failure: EngineError | None = None  # set when the engine is closed or cannot be restarted
        self._last_message = time.monotonic()

    # Start and end of the process

    def spawn(self, others: Sequence["VllmEngine"] = ()) -> None:
        """Start the process without waiting for it. It imports vLLM in the meantime.

        others: engines with the same environment variables. Their processes are forked from this one after it has
        imported vLLM, so that vLLM is imported only once. The processes are independent afterwards.
        """
        slots = [engine._open_slot() for engine in (self, *others)]
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **self.env,
        }
        fds = [fd for *fds, _ in slots for fd in fds]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rstar_lab.rl.engines.vllm_worker", json.dumps(slots)],
                pass_fds=fds,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=slots[0][2],
                stderr=slots[0][2],
                start_new_session=True,  # the parent handles Ctrl-C
            )
        finally:
            for fd in fds:
                os.close(fd)

    def _open_slot(self) -> tuple[int, int, int, str]:
        """Return the resources of the worker process: a socket, a pipe that closes when this process ends (the life pipe), a
        log file, and a folder for vLLM's temporary files."""
        parent_end, child_end = socket.socketpair()
        life, self._life = os.pipe()
        self._connection = Connection(parent_end.detach())
        self._sockets = LockedFolder("vllm")
        log = os.open(self.log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return child_end.detach(), life, log, str(self._sockets.path)

    async def start(self, model: Path | str, options: dict[str, Any]) -> None:
        """Send the process its model and wait until it serves it. Raises UserError if the model cannot be loaded.

        options: keyword arguments of `vllm.LLM`.
        """
        if self._life is None:
            self.spawn()
        self.model, self.options = str(model), options
        self._send((self.model, self.options))
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(None, _receive, self._connection)
        if answer[0] == "hello":
            self._process = self._process or _ForkedProcess(answer[1])
            answer = await loop.run_in_executor(None, _receive, self._connection)
        if answer[0] in ("died", "failed"):
            self._end_process()
            reason = answer[1] if answer[0] == "failed" else "its process died"
            raise UserError(f"engine: vLLM could not load {self.model}: {reason}{end_of_log(self.log)}")
        self.kv_tokens: int = answer[1]
        self._loop = loop
        self._last_message = time.monotonic()
        threading.Thread(target=self._read, args=(self._connection,), daemon=True).start()
        self._watchdog = loop.create_task(self._watch())

    def _read(self, connection: Connection) -> None:
        message: Any = ("started",)
        while message[0] != "died":
            message = _receive(connection)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._handle, message, connection)

    def _handle(self, message: Any, connection: Connection) -> None:
        if connection is not self._connection:
            return  # a message of an earlier process
        self._last_message = time.monotonic()
        match message:
            case ("done", results):
                for request_id, token_ids, log_probs, reason, version, parts in results:
                    if reason == "error" and self._retry(request_id):
                        continue
                    self._retried.discard(request_id)
                    _, future = self._pending.pop(request_id, (None, None))
                    if future and not future.done() and reason == "error":
                        future.set_exception(
                            EngineError(f"{self.name}: vLLM ended a request twice with an internal error")
                        )
                    elif future and not future.done():
                        finish = FinishReason(reason)
                        future.set_result(Completion(token_ids, log_probs, finish, self.name, version, parts))
            case ("refused", request_id, text):
                _, future = self._pending.pop(request_id, (None, None))
                if future and not future.done():
                    future.set_exception(RequestRefused(f"{self.name} rejected a request: {text}"))
            case ("weights", _):
                if self._weights_loaded and not self._weights_loaded.done():
                    self._weights_loaded.set_result(None)
            case ("weights_failed", text):
                if self._weights_loaded and not self._weights_loaded.done():
                    self._weights_loaded.set_exception(
                        EngineError(f"{self.name}: the new weights were not loaded: {text}")
                    )
                else:  # weights sent again after a restart: the engine has those of the model folder
                    self._fail(EngineError(f"{self.name}: the weights were not loaded after a restart: {text}"))
            case ("died",) if not self._closed:
                self._restart_task = self._loop.create_task(self._restart())

    def _retry(self, request_id: int) -> bool:
        """Send a request again, once. Returns False if it was already sent again or was cancelled."""
        request, _ = self._pending.get(request_id, (None, None))
        if request is None or request_id in self._retried:
            return False
        self._retried.add(request_id)
        self._send(("generate", [request]))
        return True

    async def _watch(self) -> None:
        period, named = min(5.0, self.stall_s / 4), False
        while not self._closed:
            started = time.monotonic()
            await asyncio.sleep(period)
            # While the event loop is blocked (by an update, a checkpoint), heartbeats arrive but are not handled.
            self._last_message += max(0.0, time.monotonic() - started - period)
            if not (self._pending or (self._weights_loaded and not self._weights_loaded.done())):
                self._last_message = time.monotonic()
            silent_s = time.monotonic() - self._last_message
            if silent_s > NAMED_S and not named:
                LOG.warning("%s, process %s, is silent; it is ended after %.0f s", self.name, self.pid, self.stall_s)
            named = silent_s > NAMED_S
            if silent_s > self.stall_s and self._process:
                self._last_message = time.monotonic()
                self._process.kill()  # the reader thread sees the end of the connection and calls `_restart`

    async def _restart(self) -> None:
        self._end_process()
        if self.restarts_left <= 0:
            self._fail(EngineError(f"{self.name} died too often{end_of_log(self.log)}"))
            return
        self.restarts_left -= 1
        self._watchdog.cancel()
        try:
            await self.start(self.model, self.options)
            if self._weights:
                self._send_weights()
        except (UserError, EngineError) as error:
            self._fail(EngineError(str(error)))
            return
        if self._pending:
            self._send(("generate", [request for request, _ in self._pending.values()]))

    def _fail(self, error: EngineError) -> None:
        """Raise `error` in all unfinished requests and in all later ones."""
        self._failure = error
        waiting: list[asyncio.Future[Any]] = [future for _, future in self._pending.values()]
        self._pending.clear()
        for future in [*waiting, *filter(None, [self._weights_loaded])]:
            if not future.done():
                future.set_exception(error)

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # the process died: `_restart` sends all pending requests again
            self._connection.send(message)

    def _end_process(self) -> None:
        if self._life is None:
            return
        os.close(self._life)  # a process that is forked later exits at once
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
        self._end_process()
        self._fail(EngineError(f"{self.name} was closed"))

    @property
    def lost(self) -> bool:
        """Whether the engine cannot be restarted any more."""
        return self._failure is not None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    # Requests

    def submit(self, requests: Iterable[tuple[list[int], Sampling]]) -> list[asyncio.Future[Completion]]:
        """Send several requests in one message; they enter the engine's batch together. A cancelled one is aborted in the engine."""
        batch: list[Request] = []
        futures = []
        for prompt_ids, sampling in requests:
            request = (next(self._ids), prompt_ids, sampling)
            future: asyncio.Future[Completion] = self._loop.create_future()
            futures.append(future)
            if self._failure:
                future.set_exception(self._failure)
                continue
            self._pending[request[0]] = (request, future)
            future.add_done_callback(partial(self._abort_if_cancelled, request[0]))
            batch.append(request)
        self._send(("generate", batch))
        return futures

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Sample one completion. A cancelled call is aborted in the engine. Raises EngineError."""
        (future,) = self.submit([(prompt_ids, sampling)])
        return await future

    def _abort_if_cancelled(self, request_id: int, future: asyncio.Future[Completion]) -> None:
        if future.cancelled() and request_id in self._pending:
            del self._pending[request_id]
            self._send(("abort", [request_id]))

    def interrupt(self) -> None:
        """End every request with the tokens generated so far, as FinishReason.ABORTED."""
        self._send(("interrupt",))

    async def load_weights(self, path: Path | str, version: int) -> None:
        """Load a safetensors file of the whole model and reset the prefix cache. Raises EngineError.

        Requests in flight continue with the new weights; `Completion.versions` holds the version that sampled each
        token.
        """
        await self._load(lambda: ("file", str(path)), version)

    async def load_tensors(
        self, source: Callable[[], tuple[dict[str, Any], dict[str, str], dict[str, Any]]], version: int
    ) -> None:
        """Load GPU tensors of this process by CUDA IPC and reset the prefix cache. Raises EngineError.

        source: returns the tensors, their aliases (see `weights.tensors_to_send`) and LoRA adapters, which the engine merges (see
        `models.lora.split_state`). It is called again if the engine restarts.
        """
        await self._load(lambda: ("tensors", source()), version)

    async def _load(self, source: Callable[[], WeightSource], version: int) -> None:
        if self._failure:
            raise self._failure
        self._weights = (source, version)
        self._weights_loaded = self._loop.create_future()
        try:
            self._send_weights()
            await self._weights_loaded
        finally:
            self._in_transfer = None
            self._weights_loaded.cancel()  # no effect once the engine has answered

    def _send_weights(self) -> None:
        assert self._weights
        source, version = self._weights
        kind, payload = self._in_transfer = source()  # CUDA IPC: the tensors must live until the engine has read them
        if kind == "tensors":
            # Pickled here, because a machine without CUDA IPC (WSL2, some containers) raises errors of torch.
            try:
                payload = bytes(ForkingPickler.dumps(payload))
            except Exception as error:
                raise EngineError(f"{self.name}: the weights cannot be shared: {error}") from error
        self._send(("weights", (kind, payload), version))
