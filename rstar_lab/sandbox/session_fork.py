"""Forks the interpreter of a session. The interpreter forks the copies itself; each copy then gets its own supervisor."""

import asyncio
import json
import uuid
from collections.abc import Callable

from rstar_lab.sandbox.call import COPY_SEPARATOR, ForkError, first_session
from rstar_lab.sandbox.runtime import protocol
from rstar_lab.sandbox.sessions import ForkGroup, Session, Sessions
from rstar_lab.sandbox.supervisor_pool import (
    SessionRefused,
    SupervisorConnection,
    SupervisorDied,
    SupervisorPool,
    SupervisorUnresponsive,
)

# Copies that are forked in one step; each requires a new supervisor process.
AT_ONCE = 16
# Seconds in which an interpreter must fork AT_ONCE copies.
ANSWER_S = 5.0
# Seconds after which a fork without an answer counts as waiting, so that it does not hold a slot.
BLOCKED_S = 0.1


class Forker:
    """Forks sessions of one sandbox. request: limits of the copies."""

    def __init__(self, pool: SupervisorPool, sessions: Sessions, request: protocol.Request) -> None:
        self.pool = pool
        self.sessions = sessions
        self.request = request._replace(timeout_s=ANSWER_S)
        # Called with True if the interpreter does not answer within BLOCKED_S, and with False at the end.
        self.on_waiting: Callable[[bool], None] = lambda waiting: None

    async def fork(self, original: Session, n: int) -> list[str]:
        """Fork `n` copies and return their names. Raises ForkError; then no copy remains."""
        copies: list[Session] = []
        try:
            while len(copies) < n:
                copies += await self._fork_some(original, min(AT_ONCE, n - len(copies)))
        except BaseException:
            for copy in copies:
                self.sessions.drop(copy.name, None)
            raise
        return [copy.name for copy in copies]

    async def _fork_some(self, original: Session, count: int) -> list[Session]:
        connection = original.connection
        if connection is None or not connection.alive:
            raise ForkError("the session has ended")
        timer = asyncio.get_running_loop().call_later(BLOCKED_S, self.on_waiting, True)
        try:
            result = await connection.call(self._message(protocol.FORK, str(count)), ANSWER_S)
        except (SupervisorDied, SupervisorUnresponsive) as error:
            raise ForkError("the session has ended") from error
        finally:
            timer.cancel()
            self.on_waiting(False)
        offered = [protocol.Copy(*fields) for fields in json.loads(result.value or b"[]")]
        if offered and original.fork_group is None:
            ForkGroup(original).join(original)
        adopted = await asyncio.gather(*(self._adopt(original, copy) for copy in offered), return_exceptions=True)
        connection.send(protocol.RELEASE)
        copies = [session for session in adopted if isinstance(session, Session)]
        if len(copies) < count:
            for session in copies:
                self.sessions.drop(session.name, None)
            errors = [error for error in adopted if isinstance(error, BaseException)]
            if errors and isinstance(errors[0], SessionRefused):
                raise ForkError("the sandbox is short of memory or processes; close sessions or try later")
            raise ForkError(
                "the interpreter did not fork: it does not answer, or reached its limit of memory or processes"
            )
        return copies

    async def _adopt(self, original: Session, copy: protocol.Copy) -> Session:
        """Start the supervisor of a copy and register its session."""
        assert original.connection is not None and original.fork_group is not None
        connection: SupervisorConnection = await self.pool.start_supervisor(original.connection.zygote, session=True)
        try:
            result = await connection.call(self._message(protocol.ADOPT, json.dumps(copy)), ANSWER_S)
        except BaseException:
            self.pool.discard(connection)
            raise
        if not result.alive:
            self.pool.discard(connection)
            raise ForkError("the copy has ended")
        session = Session(f"{first_session(original.name)}{COPY_SEPARATOR}{uuid.uuid4().hex[:16]}")
        session.connection = connection
        original.fork_group.join(session)
        self.sessions.add(session)
        return session

    def _message(self, kind: bytes, text: str) -> bytes:
        return protocol.pack_request(self.request, text.encode(), b"", kind)
