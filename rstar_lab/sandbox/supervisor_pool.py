"""The trusted side's view of the box: starts the zygotes, asks them for supervisors, talks to supervisors."""

import array
import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from rstar_lab.sandbox.runtime import protocol

TIERS = ("bare", "numpy", "sympy", "scipy")
START_TIMEOUT_S = 60.0
# A supervisor answers within the limit and its slack; silent for so much longer, it is taken for dead.
SILENCE_S = 2.5
_BOOT = """import sys
sys.path.insert(0, {root!r})
from rstar_lab.sandbox.runtime.zygote import entry
sys.path[0] = ""
sys.argv, arguments = ["main.py"], sys.argv
entry(arguments)
"""


class SupervisorDied(Exception):
    """A supervisor or its zygote ended without an answer."""


class SupervisorUnresponsive(Exception):
    """A supervisor did not answer in time; it is ended."""


class SupervisorConnection(asyncio.Protocol):
    """The socket to one supervisor."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.alive = True
        self.dying = False
        self.on_long = lambda: None
        self.on_ready = lambda: None
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._pending_result: asyncio.Future[protocol.Result] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        if self._pending_result and not self._pending_result.done():
            self._pending_result.set_exception(SupervisorDied())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= protocol.HEAD.size:
            size, kind = protocol.HEAD.unpack_from(self._buffer)
            end = protocol.HEAD.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[protocol.HEAD.size : end])
            del self._buffer[:end]
            if kind == protocol.LONG:
                self.on_long()
            elif kind == protocol.READY:
                self.dying = False
                self.on_ready()
            elif kind == protocol.RESULT and self._pending_result and not self._pending_result.done():
                result = protocol.unpack_result(body)
                self.dying = result.dying
                self._pending_result.set_result(result)

    async def call(self, message: bytes, wall_s: float) -> protocol.Result:
        """Send a packed request and return its result. wall_s: seconds after which the supervisor ends the call.

        Raises SupervisorDied, or SupervisorUnresponsive if no result arrives in time.
        """
        if not self.alive or self._transport is None:
            raise SupervisorDied
        loop = asyncio.get_running_loop()
        self.on_ready = lambda: None
        self._pending_result = loop.create_future()
        self._transport.write(message)
        timer = loop.call_later(wall_s + SILENCE_S, self._on_no_answer)
        try:
            return await self._pending_result
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            timer.cancel()
            self.on_long = lambda: None

    def _on_no_answer(self) -> None:
        if self._pending_result and not self._pending_result.done():
            self._pending_result.set_exception(SupervisorUnresponsive())
        self.close()

    def preempt(self) -> None:
        """Tell the supervisor that others need its processor more."""
        if self._transport is not None:
            self._transport.write(protocol.HEAD.pack(0, protocol.YIELD))

    def close(self) -> None:
        self.alive = False
        if self._transport is not None:
            self._transport.abort()


class SupervisorPool:
    """All zygotes of one sandbox. Ends when closed, and by itself when this process ends."""

    def __init__(self, workers: int) -> None:
        self.missing: dict[str, str] = {}
        self.supervisors: set[SupervisorConnection] = set()
        self._workers = workers
        self._idle: dict[str, list[SupervisorConnection]] = {tier: [] for tier in TIERS}
        self._broken = False
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen | None = None
        self._controls: dict[str, socket.socket] = {}
        self._ready: dict[str, asyncio.Future[bool]] = {}

    @property
    def zygotes(self) -> int:
        return sum(future.done() and not future.cancelled() and future.result() for future in self._ready.values())

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._broken and self._process.poll() is None

    async def start(self) -> None:
        """Return when the bare zygote is ready; the others warm up meanwhile. Raises RuntimeError."""
        loop = asyncio.get_running_loop()
        theirs = []
        for tier in TIERS:
            ours, other = socket.socketpair()
            ours.setblocking(False)
            self._controls[tier] = ours
            self._ready[tier] = loop.create_future()
            theirs.append(other)
        root = str(Path(__file__).parents[2])
        fds = [sock.fileno() for sock in theirs]
        command = [
            sys.executable,
            "-I",
            "-c",
            _BOOT.format(root=root),
            str(os.getpid()),
            str(self._workers),
            *map(str, fds),
        ]
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": "/box/work",
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(  # noqa: ASYNC220  (returns at once)
            command, env=environment, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        for sock in theirs:
            sock.close()
        for tier, control in self._controls.items():
            loop.add_reader(control, self._on_control_message, tier, control)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                started = await asyncio.shield(self._ready["bare"])
        except TimeoutError:
            started = False
        if not started:
            await self.close()
            raise RuntimeError("the sandbox's zygote did not start; what it said stands above, on stderr")

    def _on_control_message(self, tier: str, control: socket.socket) -> None:
        try:
            word = control.recv(65536)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            word = b""
        ready = self._ready[tier]
        if not word:
            asyncio.get_running_loop().remove_reader(control)
            if ready.done():
                self._broken = True
            else:
                # It died of its imports: as good as missing.
                ready.set_result(False)
        elif not ready.done():
            if word[1:].strip():
                self.missing = json.loads(word[1:])
            ready.set_result(word[:1] == b"+")

    async def wait_for_tier(self, tier: str) -> str:
        """Wait until the tier's zygote is warm; its name, or where its libraries are missing that of the next below.

        Raises SupervisorDied where not even the bare one is there.
        """
        for name in reversed(TIERS[: TIERS.index(tier) + 1]):
            if await asyncio.shield(self._ready[name]):
                return name
        raise SupervisorDied

    async def acquire(self, tier: str) -> SupervisorConnection:
        """An idle supervisor, or a new one."""
        idle = self._idle[tier]
        while idle:
            link = idle.pop()
            if link.alive:
                return link
        return await self.start_supervisor(tier)

    def release(self, link: SupervisorConnection) -> None:
        """For the next call; that of processes still dying when they are gone."""
        link.on_ready = lambda: self._idle[link.tier].append(link)
        if not link.dying:
            link.on_ready()

    def discard(self, link: SupervisorConnection) -> None:
        """Forget a supervisor that ended or is to end."""
        link.close()
        self.supervisors.discard(link)

    async def start_supervisor(self, tier: str) -> SupervisorConnection:
        """Fork a supervisor from the tier's zygote, or from the nearest one below it that this machine has."""
        name, number = await self.wait_for_tier(tier), next(self._numbers)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._controls[name].sendmsg(
                    [number.to_bytes(4, "little")],
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))],
                )
            except OSError as error:
                ours.close()
                raise SupervisorDied from error
        link = SupervisorConnection(tier)
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
        self.supervisors.add(link)
        return link

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        for link in self.supervisors:
            link.close()
        self.supervisors.clear()
        for control in self._controls.values():
            loop.remove_reader(control)
            control.close()
        for ready in self._ready.values():
            if not ready.done():
                ready.set_result(False)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(self._process.wait, 10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
