"""The embedded sandbox: no server, no Redis."""

import asyncio
import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import Iterable

from rstar_lab.outcomes import Outcome
from rstar_lab.sandbox.box import frames
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.sandbox.fleet import Fleet, KeeperDied, KeeperLink
from rstar_lab.sandbox.limits import MAX_STDIN_BYTES, Limits, check_memory, check_timeout

ATTEMPTS = 3
# A keeper answers within the limit and its slack; past this it is taken for dead.
SILENCE_S = 2.5


def tier_of(code: str) -> str:
    """Which zygote has what this code imports; a wrong guess costs time only."""
    if "scipy" in code:
        return "scipy"
    if "sympy" in code or "mpmath" in code:
        return "sympy"
    return "numpy" if "numpy" in code or "pandas" in code else "bare"


class LocalSandbox:
    """Runs model-written Python in isolated processes of this machine.

        async with LocalSandbox() as sandbox:
            result = await sandbox.run("print(6 * 7)")

    workers: calls that run at once (default: the cores this process may use). Any number may be in flight: the others
    wait. One event loop at a time. The boundary is described in docs/sandbox-boundary.md.
    """

    def __init__(self, limits: Limits = Limits(), workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers: {workers!r} must be at least 1")
        self.limits = limits
        self.workers = workers or len(os.sched_getaffinity(0))
        self.outcomes: Counter[Outcome] = Counter()
        self.retries = 0
        self.running = 0
        self._fleet: Fleet | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._idle: dict[str, list[KeeperLink]] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._in_flight = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def in_flight(self) -> int:
        """Calls submitted and not yet answered."""
        return self._in_flight

    @property
    def queue_depth(self) -> int:
        """Calls that wait for a slot."""
        return sum(not future.done() for future in self._waiting)

    @property
    def zygotes(self) -> int:
        """Zygotes that are warm."""
        return self._fleet.zygotes if self._fleet else 0

    async def __aenter__(self) -> "LocalSandbox":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start the zygotes; `run` does so where it was not done. Raises RuntimeError where they cannot start."""
        await self._live_fleet()

    async def drain(self) -> None:
        """Wait until every call is answered."""
        await self._quiet.wait()

    async def aclose(self) -> None:
        """End every process; calls still in flight raise RuntimeError. Closing twice is fine."""
        self._closed = True
        fleet, self._fleet = self._fleet, None
        if fleet:
            await fleet.close()
        self._idle.clear()
        for future in self._waiting:
            if not future.done():
                future.set_exception(RuntimeError("the sandbox was closed"))

    async def run(
        self,
        code: str,
        stdin: str = "",
        *,
        seed: int | None = None,
        timeout_s: float | None = None,
        memory_mb: int | None = None,
        session: str | None = None,
    ) -> CallResult:
        """Run code and say what came of it. Never raises for what the code does.

        Raises ValueError for a limit past its maximum, RuntimeError where the sandbox is closed or cannot start.
        """
        return await self._run(Call(code, stdin, seed, timeout_s, memory_mb, session))

    async def run_many(self, calls: Iterable[Call]) -> list[CallResult]:
        """Run calls side by side; results come in the order of the calls."""
        return list(await asyncio.gather(*(self._run(call) for call in calls)))

    async def _run(self, call: Call) -> CallResult:
        request = self._request(call)
        self._in_flight += 1
        self._quiet.clear()
        try:
            result = await self._attempt(call, request)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._quiet.set()
        self.outcomes[result.outcome] += 1
        return result

    def _request(self, call: Call) -> frames.Request:
        limits = self.limits
        stdin = call.stdin.encode("utf-8", "surrogatepass")
        if len(stdin) > MAX_STDIN_BYTES:
            raise ValueError(f"stdin: {len(stdin)} bytes are more than {MAX_STDIN_BYTES}")
        return frames.Request(
            code=call.code.encode("utf-8", "surrogatepass"),
            stdin=stdin,
            seed=call.seed,
            timeout_s=limits.timeout_s if call.timeout_s is None else check_timeout(call.timeout_s),
            wall_slack_s=limits.wall_slack_s,
            memory_mb=limits.memory_mb if call.memory_mb is None else check_memory(call.memory_mb),
            processes=limits.processes,
            open_files=limits.open_files,
            file_mb=limits.file_mb,
            output_bytes=limits.output_bytes,
            value_bytes=limits.value_bytes,
            session=call.session is not None,
        )

    async def _attempt(self, call: Call, request: frames.Request) -> CallResult:
        queued = time.monotonic()
        try:
            await self._take_slot()
        except TimeoutError:
            return CallResult(Outcome.QUEUE_TIMEOUT, "", "", None, 0.0, time.monotonic() - queued)
        started = time.monotonic()
        try:
            for attempt in range(ATTEMPTS):
                if attempt:
                    self.retries += 1
                with contextlib.suppress(KeeperDied):
                    result = await self._on_keeper(tier_of(call.code), request)
                    return CallResult(
                        Outcome(result.outcome),
                        result.stdout.decode("utf-8", "backslashreplace"),
                        result.stderr.decode("utf-8", "backslashreplace"),
                        None if result.value is None else result.value.decode("utf-8", "backslashreplace"),
                        result.duration_s,
                        started - queued,
                    )
            return CallResult(Outcome.SANDBOX_ERROR, "", "", None, time.monotonic() - started, started - queued)
        finally:
            self._free_slot()

    async def _on_keeper(self, tier: str, request: frames.Request) -> frames.Result:
        fleet = await self._live_fleet()
        idle = self._idle.setdefault(tier, [])
        link = None
        while idle and link is None:
            candidate = idle.pop()
            link = candidate if candidate.alive else None
        if link is None:
            link = await fleet.keeper(tier)
        try:
            result = await link.call(request, request.timeout_s + request.wall_slack_s + SILENCE_S)
        except BaseException:
            fleet.keepers.discard(link)
            fleet.sweep()
            raise
        idle.append(link)
        return result

    async def _live_fleet(self) -> Fleet:
        if self._closed:
            raise RuntimeError("the sandbox is closed")
        if self._fleet and self._fleet.alive:
            return self._fleet
        async with self._starting:
            if self._fleet and not self._fleet.alive:
                self._idle.clear()
                await self._fleet.close()
                self._fleet = None
            if self._fleet is None:
                fleet = Fleet(self.workers)
                await fleet.start()
                self._fleet = fleet
            return self._fleet

    async def _take_slot(self) -> None:
        if self.running < self.workers:
            self.running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self.limits.queue_timeout_s):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._free_slot()
            raise

    def _free_slot(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1
