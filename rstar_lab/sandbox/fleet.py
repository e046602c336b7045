"""The trusted side's view of the box: starts the zygotes, asks them for keepers, talks to keepers."""

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

from rstar_lab.sandbox.box import frames

TIERS = ("bare", "numpy", "sympy", "scipy")
START_TIMEOUT_S = 60.0
# A keeper answers within the limit and its slack; silent for so much longer, it is taken for dead.
SILENCE_S = 2.5
_BOOT = """import sys
sys.path.insert(0, {root!r})
from rstar_lab.sandbox.box.zygote import entry
sys.path[0] = ""
sys.argv, arguments = ["main.py"], sys.argv
entry(arguments)
"""


class KeeperDied(Exception):
    """A keeper or its zygote ended without an answer."""


class KeeperSilent(Exception):
    """A keeper did not answer in time; it is ended."""


class KeeperLink(asyncio.Protocol):
    """The socket to one keeper."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.alive = True
        self.dying = False
        self.on_long = lambda: None
        self.on_ready = lambda: None
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._answer: asyncio.Future[frames.Result] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        if self._answer and not self._answer.done():
            self._answer.set_exception(KeeperDied())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= frames.HEAD.size:
            size, kind = frames.HEAD.unpack_from(self._buffer)
            end = frames.HEAD.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[frames.HEAD.size : end])
            del self._buffer[:end]
            if kind == frames.LONG:
                self.on_long()
            elif kind == frames.READY:
                self.dying = False
                self.on_ready()
            elif kind == frames.RESULT and self._answer and not self._answer.done():
                result = frames.unpack_result(body)
                self.dying = result.dying
                self._answer.set_result(result)

    async def call(self, message: bytes, wall_s: float) -> frames.Result:
        """Send a packed request, which the keeper ends after wall_s. Raises KeeperDied, and KeeperSilent where no answer comes."""
        if not self.alive or self._transport is None:
            raise KeeperDied
        loop = asyncio.get_running_loop()
        self.on_ready = lambda: None
        self._answer = loop.create_future()
        self._transport.write(message)
        timer = loop.call_later(wall_s + SILENCE_S, self._give_up)
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            timer.cancel()
            self.on_long = lambda: None

    def _give_up(self) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(KeeperSilent())
        self.close()

    def yield_slot(self) -> None:
        """Tell the keeper that others need its processor more."""
        if self._transport is not None:
            self._transport.write(frames.HEAD.pack(0, frames.YIELD))

    def close(self) -> None:
        self.alive = False
        if self._transport is not None:
            self._transport.abort()


class Fleet:
    """All zygotes of one sandbox. Ends when closed, and by itself when this process ends."""

    def __init__(self, workers: int) -> None:
        self.missing: dict[str, str] = {}
        self.keepers: set[KeeperLink] = set()
        self._workers = workers
        self._idle: dict[str, list[KeeperLink]] = {tier: [] for tier in TIERS}
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
            loop.add_reader(control, self._hear, tier, control)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                started = await asyncio.shield(self._ready["bare"])
        except TimeoutError:
            started = False
        if not started:
            await self.close()
            raise RuntimeError("the sandbox's zygote did not start; what it said stands above, on stderr")

    def _hear(self, tier: str, control: socket.socket) -> None:
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

    async def nearest(self, tier: str) -> str:
        """Wait until the tier's zygote is warm; its name, or where its libraries are missing that of the next below.

        Raises KeeperDied where not even the bare one is there.
        """
        for name in reversed(TIERS[: TIERS.index(tier) + 1]):
            if await asyncio.shield(self._ready[name]):
                return name
        raise KeeperDied

    async def borrow(self, tier: str) -> KeeperLink:
        """An idle keeper, or a new one."""
        idle = self._idle[tier]
        while idle:
            link = idle.pop()
            if link.alive:
                return link
        return await self.new_keeper(tier)

    def give_back(self, link: KeeperLink) -> None:
        """For the next call; that of processes still dying when they are gone."""
        link.on_ready = lambda: self._idle[link.tier].append(link)
        if not link.dying:
            link.on_ready()

    def lose(self, link: KeeperLink) -> None:
        """Forget a keeper that ended or is to end."""
        link.close()
        self.keepers.discard(link)

    async def new_keeper(self, tier: str) -> KeeperLink:
        """Fork a keeper from the tier's zygote, or from the nearest one below it that this machine has."""
        name, number = await self.nearest(tier), next(self._numbers)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._controls[name].sendmsg(
                    [number.to_bytes(4, "little")],
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))],
                )
            except OSError as error:
                ours.close()
                raise KeeperDied from error
        link = KeeperLink(tier)
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
        self.keepers.add(link)
        return link

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        for link in self.keepers:
            link.close()
        self.keepers.clear()
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
