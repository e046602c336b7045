"""Tenants of a shared service: each has a token, quotas, and sessions of its own."""

import asyncio
import contextlib
import hmac
import json
import math
import time
import tomllib
from collections.abc import AsyncIterator, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox.access import BusyError
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.sandbox.wire import SessionEnd, SessionFork, Work, failure

SEPARATOR = "/"
# Outcomes of calls that did not run.
NOT_RUN = (Outcome.INVALID_ARGUMENTS, Outcome.QUEUE_TIMEOUT, Outcome.SANDBOX_ERROR)
MIN_TOKEN = 16  # characters
# Seconds without use after which a session no longer counts; the sandbox drops it then (Limits.session_idle_s).
SESSION_IDLE_S = 900.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant and its quotas. None means no limit.

    calls: calls in flight. calls_per_s: average rate, with bursts of one second. memory_mb: sum of the memory limits of calls
    that run at the same time; more calls wait. sessions: live sessions.
    """

    name: str
    token: str
    calls: int | None = None
    calls_per_s: float | None = None
    memory_mb: int | None = None
    sessions: int | None = None


def load_tenants(path: Path) -> list[Tenant]:
    """Read a TOML file with one table per tenant. Raises UserError that names the tenant and the key."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--tenants {path}: {error}") from error
    known = [field.name for field in fields(Tenant) if field.name != "name"]
    tenants = []
    for name, table in tables.items():
        where = f"--tenants {path}: {name}"
        if not isinstance(table, dict) or SEPARATOR in name:
            raise UserError(f"{where}: write one table per tenant: [{name.replace(SEPARATOR, '-')}]")
        for key, value in table.items():
            if key not in known:
                raise UserError(f"{where}.{key}: unknown key; known keys are {', '.join(known)}")
            if key != "token" and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise UserError(f"{where}.{key}: {value!r} must be a number greater than 0")
        if not isinstance(table.get("token"), str) or len(table["token"]) < MIN_TOKEN:
            raise UserError(f"{where}.token: must be a text of at least {MIN_TOKEN} characters")
        tenants.append(Tenant(name, **table))
    if not tenants:
        raise UserError(f"--tenants {path}: no tenant; write one table per tenant")
    if len({tenant.token for tenant in tenants}) < len(tenants):
        raise UserError(f"--tenants {path}: two tenants have the same token")
    return tenants


class Account:
    """The current usage of one tenant."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.calls = 0
        self.bytes = 0  # of requests that are held in memory
        self.memory_mb = 0
        self._memory_freed = asyncio.Condition()
        self._allowance = max(1.0, tenant.calls_per_s or math.inf)
        self._refilled = time.monotonic()
        self._sessions: dict[str, float] = {}
        # Names of the sessions in which a call has run.
        self._live: set[str] = set()

    def admit(self, calls: int) -> None:
        """Count calls against the rate and the calls in flight. Raises BusyError if one of them is used up.

        A request with more calls than the quota is accepted if nothing else runs; later requests are then refused until the
        average rate is met.
        """
        tenant = self.tenant
        if tenant.calls is not None and self.calls and self.calls + calls > tenant.calls:
            raise BusyError(
                1, reason=f"tenant {tenant.name} has {self.calls} calls in flight, its quota is {tenant.calls}"
            )
        if tenant.calls_per_s is not None:
            now = time.monotonic()
            self._allowance += (now - self._refilled) * tenant.calls_per_s
            self._allowance = min(self._allowance, max(1.0, tenant.calls_per_s))
            self._refilled = now
            if self._allowance < 1:
                seconds = math.ceil((1 - self._allowance) / tenant.calls_per_s)
                raise BusyError(
                    seconds, reason=f"tenant {tenant.name} is limited to {tenant.calls_per_s:g} calls per second"
                )
            self._allowance -= calls
        self.calls += calls

    def release(self, calls: int) -> None:
        self.calls -= calls

    @contextlib.asynccontextmanager
    async def memory(self, needed_mb: int) -> AsyncIterator[None]:
        """Wait until the memory quota has room for a call, and reserve its memory for the duration of the block.

        Raises ValueError for a call that is larger than the quota.
        """
        quota = self.tenant.memory_mb
        if quota is None:
            yield
            return
        if needed_mb > quota:
            raise ValueError(f"memory_mb: {needed_mb} is more than the quota of tenant {self.tenant.name}, {quota}")
        async with self._memory_freed:
            await self._memory_freed.wait_for(lambda: self.memory_mb + needed_mb <= quota)
            self.memory_mb += needed_mb
        try:
            yield
        finally:
            self.memory_mb -= needed_mb
            async with self._memory_freed:
                self._memory_freed.notify_all()

    def own(self, work: Work) -> Work:
        """Return the work with its session renamed, so that tenants cannot use each other's sessions."""
        if isinstance(work, Call | SessionEnd | SessionFork) and work.session is not None:
            return replace(work, session=f"{self.tenant.name}{SEPARATOR}{work.session}")
        return work

    def refuse_session(self, work: Work) -> CallResult | None:
        """Count the session of a call. Returns a failed result for a call that would exceed the quota of sessions, else None."""
        now = time.monotonic()
        if isinstance(work, SessionEnd):
            self._drop(work.session)
        if not isinstance(work, Call | SessionFork) or work.session is None:
            return None
        for name in [name for name, used in self._sessions.items() if now - used >= SESSION_IDLE_S]:
            self._drop(name)
        new = work.n if isinstance(work, SessionFork) else work.session not in self._sessions
        quota = self.tenant.sessions
        if quota is not None and new and len(self._sessions) + new > quota:
            text = f"[session not started: tenant {self.tenant.name} has {len(self._sessions)} sessions, its quota is {quota}]\n"
            return failure(Outcome.SANDBOX_ERROR, text)
        if isinstance(work, Call):
            self._sessions[work.session] = now
        return None

    def forget_session(self, work: Work) -> None:
        """Do not count the session of a call that did not run, unless an earlier call in it ran."""
        if isinstance(work, Call) and work.session is not None and work.session not in self._live:
            self._drop(work.session)

    def _drop(self, session: str) -> None:
        self._sessions.pop(session, None)
        self._live.discard(session)

    def result(self, work: Work, result: CallResult) -> CallResult:
        """Return the result with the session names that the tenant uses; undoes `own`."""
        if isinstance(work, Call) and work.session is not None and result.outcome not in NOT_RUN:
            self._live.add(work.session)
        if not isinstance(work, SessionFork) or result.outcome is not Outcome.OK or result.value is None:
            return result
        names = [name.removeprefix(f"{self.tenant.name}{SEPARATOR}") for name in json.loads(result.value)]
        self._sessions.update(dict.fromkeys(names, time.monotonic()))
        self._live.update(names)
        return replace(result, value=json.dumps(names))


class Accounts:
    """The accounts of all tenants, found by token."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self._accounts = [(f"Bearer {tenant.token}".encode(), Account(tenant)) for tenant in tenants]

    def __len__(self) -> int:
        return len(self._accounts)

    def find(self, authorization: bytes) -> Account | None:
        """Return the account of an Authorization header, else None. Compares all tokens in constant time."""
        found = None
        for token, account in self._accounts:
            if hmac.compare_digest(authorization, token):
                found = account
        return found


# The account of the request that is being answered; None if the service has no tenants.
ACCOUNT: ContextVar[Account | None] = ContextVar("account", default=None)
