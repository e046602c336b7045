"""Live sessions, their forks, and the reasons why earlier ones ended."""

import asyncio
import contextlib
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from rstar_lab.sandbox.call import COPY_SEPARATOR, ForkError, first_session
from rstar_lab.sandbox.runtime import protocol
from rstar_lab.sandbox.runtime.protocol import END
from rstar_lab.sandbox.supervisor_pool import SessionRefused, SupervisorConnection, SupervisorDied, SupervisorPool

# Ended sessions whose reason is kept.
REMEMBERED = 10_000
# First line of stderr of the cell that ended its session.
ENDED = "[the session's interpreter has ended; the next call starts a new one]\n"
# Why a session was ended between two cells.
IDLE_ENDED = "it used CPU time, or kept many processes or much memory, between its cells"


class Session:
    """The state of one session.

    connection: its supervisor; None before the first cell and after its interpreter has ended. fork_group: the sessions whose
    interpreters were forked from one another; None for a session that was not forked.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.fork_group: ForkGroup | None = None
        self.lock = asyncio.Lock()
        self.users = 0
        self.connection: SupervisorConnection | None = None
        self.used = time.monotonic()

    @property
    def alive(self) -> bool:
        return self.connection is not None and self.connection.alive and not self.connection.session_ended

    def end(self) -> None:
        """End the interpreter. Copies of it continue to run."""
        connection, fork_group = self.connection, self.fork_group
        self.connection = self.fork_group = None
        if fork_group is not None:
            fork_group.leave(self, connection)
        elif connection is not None:
            connection.close()


class ForkGroup:
    """Sessions that were forked from one another. The supervisor of the first one (`root`) holds their PID namespace."""

    def __init__(self, first: Session) -> None:
        assert first.connection is not None
        self.root = first.connection
        self.members = {first}

    def join(self, session: Session) -> None:
        session.fork_group = self
        self.members.add(session)

    def leave(self, session: Session, connection: SupervisorConnection | None) -> None:
        """End the interpreter of one session; the root supervisor ends with the last one."""
        self.members.discard(session)
        if connection is self.root and self.members:
            connection.send(END)
        elif connection is not None:
            connection.close()
        if not self.members:
            self.root.close()


class Sessions:
    """All sessions of a sandbox. If there are too many, the least recently used ones are dropped."""

    def __init__(self, idle_s: float, max_sessions: int) -> None:
        self.idle_s = idle_s
        self.max_sessions = max_sessions
        self._live: OrderedDict[str, Session] = OrderedDict()
        self._lost: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def open(self, name: str) -> Session:
        """Return the session of this name, new or existing, as the most recently used. The caller must call `done` after use."""
        session = self._live.get(name)
        if session is None:
            session = Session(name)
            self.add(session)
        session.users += 1
        self._live.move_to_end(name)
        return session

    def find(self, name: str) -> Session | None:
        return self._live.get(name)

    def add(self, session: Session) -> None:
        """Add a session; if there are too many, drop the least recently used ones that are not in use."""
        self._live[session.name] = session
        for other in list(self._live.values()):
            if len(self._live) <= self.max_sessions:
                break
            if not other.users and other is not session:
                self.drop(other.name, "too many sessions")

    def done(self, session: Session) -> None:
        session.users -= 1
        session.used = time.monotonic()

    def drop(self, name: str, reason: str | None) -> None:
        """End a session. With a reason, the next result of that name states on stderr that the state is gone."""
        if session := self._live.pop(name, None):
            if session.connection is not None and reason:
                self.record_loss(name, reason)
            session.end()

    def record_loss(self, name: str, reason: str) -> None:
        self._lost[name] = reason
        if len(self._lost) > REMEMBERED:
            self._lost.popitem(last=False)

    def pop_loss(self, name: str) -> str | None:
        """Return and forget why an earlier session of this name ended; None if there is no reason to report."""
        return self._lost.pop(name, None)

    async def drop_idle_ones(self) -> None:
        """Drop idle sessions periodically until cancelled."""
        while True:
            await asyncio.sleep(min(30.0, self.idle_s / 4))
            self.drop_idle()

    def drop_idle(self) -> None:
        oldest = time.monotonic() - self.idle_s
        for session in list(self._live.values()):
            if not session.users and session.used < oldest:
                self.drop(session.name, f"idle for {self.idle_s:g} s")

    def close(self) -> None:
        for name in list(self._live):
            self.drop(name, None)


# Copies that are forked in one step; each requires a new supervisor process.
AT_ONCE = 16
# Seconds in which an interpreter must fork AT_ONCE copies.
ANSWER_S = 5.0
# Seconds after which a fork without an answer counts as waiting, so that it does not hold a slot.
BLOCKED_S = 0.1


@dataclass(frozen=True, slots=True)
class Forker:
    """Forks sessions of one sandbox: the interpreter forks the copies itself, and each gets its own supervisor.

    request: limits of the copies, with a time limit of ANSWER_S. on_waiting: called with True after BLOCKED_S without an answer of the
    session's interpreter, and with False when the request ends.
    """

    pool: SupervisorPool
    sessions: Sessions
    request: protocol.Request
    on_waiting: Callable[[bool], None]

    async def fork(self, original: Session, n: int) -> list[str]:
        """Fork `n` copies and return their names. Raises ForkError; then no copy remains."""
        names: list[str] = []
        with contextlib.ExitStack() as undo:
            while len(names) < n:
                names += await self._fork_some(original, min(AT_ONCE, n - len(names)), undo)
            undo.pop_all()
        return names

    async def _fork_some(self, original: Session, count: int, undo: contextlib.ExitStack) -> list[str]:
        connection = original.connection
        if connection is None or not connection.alive:
            raise ForkError("the session has ended")
        timer = asyncio.get_running_loop().call_later(BLOCKED_S, self.on_waiting, True)
        try:
            answer = await connection.call(self._message(protocol.FORK, str(count)), ANSWER_S)
        except SupervisorDied as error:
            raise ForkError("the session has ended") from error
        finally:
            timer.cancel()
            self.on_waiting(False)
        offered = [protocol.Copy(*fields) for fields in json.loads(answer.result.value or "[]")]
        if offered and original.fork_group is None:
            ForkGroup(original).join(original)
        adopted = await asyncio.gather(*(self._adopt(original, copy, undo) for copy in offered), return_exceptions=True)
        connection.send(protocol.RELEASE)
        if any(isinstance(result, SessionRefused) for result in adopted):
            raise ForkError("the sandbox is short of memory or processes; close sessions or try later")
        names = [result for result in adopted if isinstance(result, str)]
        if len(names) < count:
            raise ForkError(
                "the interpreter did not fork: it does not answer, or reached its limit of memory or processes"
            )
        return names

    async def _adopt(self, original: Session, copy: protocol.Copy, undo: contextlib.ExitStack) -> str:
        """Start the supervisor of a copy, register its session and return its name. undo: ends the session again."""
        assert original.connection is not None and original.fork_group is not None
        connection: SupervisorConnection = await self.pool.start_supervisor(original.connection.zygote, session=True)
        answer = await connection.call(self._message(protocol.ADOPT, json.dumps(copy)), ANSWER_S)
        if not answer.alive:
            connection.close()
            raise ForkError("the copy has ended")
        session = Session(f"{first_session(original.name)}{COPY_SEPARATOR}{uuid.uuid4().hex[:16]}")
        session.connection = connection
        original.fork_group.join(session)
        self.sessions.add(session)
        undo.callback(self.sessions.drop, session.name, None)
        return session.name

    def _message(self, kind: bytes, text: str) -> bytes:
        return protocol.pack_request(self.request, text.encode(), b"", kind)
