"""Starts the zygotes and supervisors of a sandbox and exchanges messages with them. Runs in the embedding program."""

import array
import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.common.temporary import LockedFolder
from rstar_lab.hardware.ends import wait_or_kill
from rstar_lab.sandbox.call_request import Answer, unpack_answer
from rstar_lab.sandbox.runtime import protocol
from rstar_lab.sandbox.runtime.zygote import PRELOAD, TIERS

START_TIMEOUT_S = 60.0
# Seconds after a call's limit and slack until the program of a supervisor without an answer is killed, and until the supervisor is.
# With control groups of version 2, a supervisor can wait for memory that its program takes again and again.
LATE_S, SILENCE_S = 1.5, 2.5
# Idle supervisors that are kept, per worker.
IDLE_PER_WORKER = 16
# Seconds that a supervisor has to end its program after its connection was closed, before it is killed.
END_S = 5.0
# Seconds in which a zygote must answer after one of its supervisors did not. If it does not, all processes are replaced.
PONG_S = 20.0
# Folders that the root file system of programs replaces, or that would expose the whole machine.
_FORBIDDEN = ("/", "/proc", "/sys", "/dev", "/tmp", "/var/tmp", "/etc", "/box")
log = logging.getLogger(__name__)
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/box/work",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
# Ctrl-C in a terminal sends SIGINT to all its processes. The zygotes ignore it: the embedding program ends them.
# The launcher reads this from its standard input, because programs can read its command line.
_BOOT = """import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path.insert(0, {root!r})
from rstar_lab.sandbox.runtime.zygote import main
sys.path[0] = ""
sys.argv = ["main.py"]
main(*{arguments!r})
"""


class SupervisorDied(Exception):
    """A supervisor or its zygote gave no answer. event: the kind of failure. outcome, message: of its call."""

    event, message = "supervisor_died", ""
    outcome = Outcome.SANDBOX_ERROR


class SupervisorUnresponsive(SupervisorDied):
    """A supervisor did not answer in time and is killed. outcome: of the limit that it had reported as exceeded."""

    event = "supervisor_unresponsive"

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class SessionRefused(SupervisorDied):
    """The sandbox has too little memory or too many processes for another session."""

    event = "session_refused"
    message = "[session not started: the sandbox is short of memory or processes; close sessions or try later]\n"


OnEvent = Callable[[bytes, bytes], object]


class SupervisorConnection(asyncio.Protocol):
    """The connection to one supervisor.

    tier: the requested tier. zygote: the tier of the zygote that forked the supervisor. number: identifies it at that zygote.
    """

    def __init__(self, tier: str, zygote: str, number: int) -> None:
        self.tier = tier
        self.zygote = zygote
        self.number = number
        self.alive = True
        self.refused = False
        # Whether the supervisor has ended its session between two cells.
        self.session_ended = False
        self.dying = False
        # The outcome of the running call without an answer: that of a limit that it has exceeded.
        self.exceeded = Outcome.SANDBOX_ERROR
        # Receives the messages of the running call about its state and output: kind and body.
        self.on_event: OnEvent | None = None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_late: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._pending_result: asyncio.Future[Answer] | None = None
        self._output_bytes = 0  # limit of each output of the running call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        self._fail(SupervisorDied())
        self.on_lost()

    def _fail(self, error: SupervisorDied) -> None:
        if self._pending_result and not self._pending_result.done():
            self._pending_result.set_exception(error)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= protocol.HEAD.size:
            size, kind = protocol.HEAD.unpack_from(self._buffer)
            end = protocol.HEAD.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[protocol.HEAD.size : end])
            del self._buffer[:end]
            if kind == protocol.REFUSED:
                self.refused = True
                self._fail(SessionRefused())
                self.close()
            elif kind == protocol.EXCEEDED:
                self.exceeded = Outcome(protocol.OUTCOMES[body[0]])
            elif kind == protocol.ENDED:
                self.session_ended = True
            elif kind == protocol.READY:
                self.dying = False
                self.on_ready()
            elif kind == protocol.RESULT and self._pending_result and not self._pending_result.done():
                answer = unpack_answer(body, self._output_bytes)
                self.dying = answer.dying
                self._pending_result.set_result(answer)
            elif self.on_event:
                self.on_event(kind, body)

    async def call(self, message: bytes, wall_s: float, on_event: OnEvent | None = None) -> Answer:
        """Send a packed request and return its answer.

        wall_s: seconds after which the supervisor ends the call. on_event: receives LONG, WAITING, ACTIVE and OUTPUT (protocol.py).
        Raises SupervisorDied, SessionRefused, or SupervisorUnresponsive if no result arrives in time. The connection is closed then.
        """
        if self.refused or not self.alive or self._transport is None:
            raise SessionRefused if self.refused else SupervisorDied
        loop = asyncio.get_running_loop()
        self.on_ready = lambda: None
        self.on_event = on_event
        self.exceeded = Outcome.SANDBOX_ERROR
        self._pending_result = loop.create_future()
        self._output_bytes = protocol.unpack_limits(message).output_bytes
        self._transport.write(message)
        late = loop.call_later(wall_s + LATE_S, lambda: self.on_late())
        timer = loop.call_later(wall_s + SILENCE_S, lambda: self._fail(SupervisorUnresponsive(self.exceeded)))
        try:
            answer = await self._pending_result
            if answer.result.outcome is Outcome.KILLED and loop.time() > late.when():  # perhaps by `on_late`
                raise SupervisorUnresponsive(self.exceeded)
            return answer
        except BaseException:
            self.close()
            raise
        finally:
            late.cancel()
            timer.cancel()
            self.on_event = None

    def send(self, kind: bytes) -> None:
        """Send a message without a body."""
        if self._transport is not None:
            self._transport.write(protocol.HEAD.pack(0, kind))

    def close(self) -> None:
        """Close the connection. The supervisor then ends its program and exits; it is killed if it does not."""
        self.alive = False
        if self._transport is not None:
            self._transport.abort()


class View(NamedTuple):
    """What programs can use in addition.

    readable: files and folders that they can read. preload: modules that an additional zygote imports.
    """

    readable: Sequence[str] = ()
    preload: Sequence[str] = ()


def check_readable(path: str | Path) -> str:
    """Return the absolute path, with symbolic links resolved.

    Raises UserError if the path does not exist, must not be shown to programs, or is not readable for their user id.
    """
    resolved = Path(path).resolve()
    if not resolved.exists():
        raise UserError(f"--readable {path}: no such file or folder")
    if str(resolved) in _FORBIDDEN:
        raise UserError(f"--readable {path}: name a folder below {resolved}, not {resolved} itself")
    if os.geteuid() == 0 and not resolved.stat().st_mode & 0o004:
        raise UserError(
            f"--readable {path}: programs run under another user id; allow it with `chmod -R o+rX {resolved}`"
        )
    return str(resolved)


class SupervisorPool:
    """The zygotes and supervisors of one sandbox. All of them end with `close`, or when this process ends."""

    def __init__(self, workers: int, view: View = View()) -> None:
        self.missing: dict[str, str] = {}
        self.supervisors: set[SupervisorConnection] = set()
        self._workers = workers
        self._view = view
        self._tiers = [*TIERS, PRELOAD] if view.preload else [*TIERS]
        self._preload_error = ""
        self._idle: dict[str, list[SupervisorConnection]] = {tier: [] for tier in self._tiers}
        self._broken = False
        self._numbers = itertools.count(1)
        self._asked: dict[str, asyncio.TimerHandle] = {}  # zygotes that have not answered a PING yet
        self._process: subprocess.Popen | None = None
        self._controls: dict[str, socket.socket] = {}
        self._ready: dict[str, asyncio.Future[bool]] = {}

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._broken and self._process.poll() is None

    async def start(self) -> None:
        """Start the zygotes. Returns when the first one is ready, while the others still import; with `preload`, when all are ready.
        The caller must call `close`, also after an error.

        Raises RuntimeError if the first zygote does not start, and UserError if a module of `preload` cannot be imported.
        """
        loop = asyncio.get_running_loop()
        theirs = []
        for tier in self._tiers:
            ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self._controls[tier] = ours
            self._ready[tier] = loop.create_future()
            theirs.append(other)
        root = str(Path(__file__).parents[2])
        fds = [sock.fileno() for sock in theirs]
        self._scratch = LockedFolder("programs", Path("/tmp"))
        self._scratch.path.chmod(0o711)  # other users can enter it but not list it
        arguments = (os.getpid(), self._workers, str(self._scratch.path), *self._view, fds)
        boot = _BOOT.format(root=root, arguments=arguments)
        self._process = subprocess.Popen(  # noqa: ASYNC220  (returns at once)
            [sys.executable, "-I", "-"], env=ENVIRONMENT, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(boot.encode())
        for sock in theirs:
            sock.close()
        for tier, control in self._controls.items():
            loop.add_reader(control, self._on_control_message, tier, control)
        first = self._ready["bare"]
        await asyncio.wait([first], timeout=START_TIMEOUT_S)
        if not first.done() or not first.result():
            raise RuntimeError("the sandbox could not start its first process; its error is printed above, on stderr")
        if PRELOAD in self._ready and not await self._ready[PRELOAD]:
            raise UserError(f"--preload: {self._preload_error or 'its import ended the process; see stderr'}")

    def _on_control_message(self, tier: str, control: socket.socket) -> None:
        message = b""
        with contextlib.suppress(OSError):  # the zygote has ended
            message = control.recv(65536)
        ready = self._ready[tier]
        if not message:
            asyncio.get_running_loop().remove_reader(control)
            if ready.done():
                self._broken = True
            else:
                # The zygote ended during its imports: treat its libraries as not installed.
                ready.set_result(False)
        elif ready.done():
            if asked := self._asked.pop(tier, None):
                asked.cancel()
        else:
            if tier == PRELOAD:
                self._preload_error = message[1:].decode().strip()
            elif tier == "bare" and message[:1] == b"+":
                self.missing = json.loads(message[1:])
            ready.set_result(message[:1] == b"+")

    def _check_zygote(self, tier: str) -> None:
        """Ask a zygote, one of whose supervisors did not answer, for an answer, and give it PONG_S seconds."""

        def give_up() -> None:
            log.warning("the sandbox's zygote %s did not answer for %g s; all its processes are replaced", tier, PONG_S)
            self._broken = True

        if tier not in self._asked:
            self._asked[tier] = asyncio.get_running_loop().call_later(PONG_S, give_up)
            with contextlib.suppress(OSError):
                self._controls[tier].send(protocol.PING.to_bytes(4, "little"))

    async def wait_for_tier(self, tier: str) -> str:
        """Wait until the tier's zygote is ready and return its name. If its libraries are not installed, use the tier below.

        Raises SupervisorDied if no zygote is running.
        """
        for name in reversed(self._tiers[: self._tiers.index(tier) + 1]):
            if await asyncio.shield(self._ready[name]):
                return name
        raise SupervisorDied

    async def acquire(self, tier: str) -> SupervisorConnection:
        """Return an idle supervisor, or start one. Raises SupervisorDied if no zygote is running."""
        idle = self._idle[tier]
        while idle:
            connection = idle.pop()
            if connection.alive:
                return connection
        return await self.start_supervisor(tier)

    def release(self, connection: SupervisorConnection) -> None:
        """Return a supervisor to the pool, after the killed processes of its call are gone."""
        connection.on_ready = lambda: self._keep(connection)
        if not connection.dying:
            connection.on_ready()

    def _keep(self, connection: SupervisorConnection) -> None:
        if len(self._idle[connection.tier]) < IDLE_PER_WORKER * self._workers:
            self._idle[connection.tier].append(connection)
        else:
            connection.close()

    def _forget(self, connection: SupervisorConnection) -> None:
        """Handle a closed connection."""
        self.supervisors.discard(connection)
        if self._process is not None:
            asyncio.get_running_loop().call_later(END_S, self._kill, connection)

    def _kill(self, connection: SupervisorConnection, flag: int = 0) -> None:
        """Ask the zygote to kill a supervisor, or its program (`KILL_PROGRAM`). Has no effect if the supervisor has exited."""
        with contextlib.suppress(OSError):
            self._controls[connection.zygote].send((connection.number | flag).to_bytes(4, "little"))

    def _on_late(self, connection: SupervisorConnection) -> None:
        self._kill(connection, protocol.KILL_PROGRAM)
        self._check_zygote(connection.zygote)

    async def start_supervisor(self, tier: str, *, session: bool = False) -> SupervisorConnection:
        """Fork a supervisor from the tier's zygote, or from the tier below if its libraries are not installed.

        Raises SupervisorDied if no zygote is running.
        """
        name, number = await self.wait_for_tier(tier), next(self._numbers)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._controls[name].sendmsg(
                    [(number | (protocol.FOR_SESSION if session else 0)).to_bytes(4, "little")],
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))],
                )
            except OSError as error:
                ours.close()
                raise SupervisorDied from error
        connection = SupervisorConnection(tier, name, number)
        connection.on_lost = lambda: self._forget(connection)
        connection.on_late = lambda: self._on_late(connection)
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
        self.supervisors.add(connection)
        return connection

    async def close(self) -> None:
        """End all zygotes and supervisors."""
        loop = asyncio.get_running_loop()
        for connection in self.supervisors:
            connection.on_lost = lambda: None
            connection.close()
        self.supervisors.clear()
        for timer in self._asked.values():
            timer.cancel()
        for control in self._controls.values():
            loop.remove_reader(control)
            control.close()
        for ready in self._ready.values():
            if not ready.done():
                ready.set_result(False)
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(wait_or_kill, self._process, 10)
            self._scratch.cleanup()
