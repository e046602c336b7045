"""A sandbox that fails a share of the calls on purpose, to measure what sandbox failures cost (`sandbox.fault_share`)."""

from collections.abc import Sequence

from rstar_lab.outcomes import Outcome
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.tools.code import Sandbox
from rstar_lab.sandbox.call import Call, CallResult

FAULT = CallResult(Outcome.SANDBOX_ERROR, "", "", None, 0.0)


class FaultySandbox:
    """Answers a share of the calls with `sandbox_error` and passes the others on.

    Whether a call fails depends only on its seed, code and input. A retry of a failed call fails too, and a second run with the
    same seed has the same failures.
    """

    def __init__(self, sandbox: Sandbox, share: float):
        """share: share of the calls that fail, from 0 to 1."""
        self.sandbox, self.share = sandbox, share

    async def run_many(self, calls: Sequence[Call]) -> list[CallResult]:
        healthy = [call for call in calls if not self._fails(call)]
        results = iter(await self.sandbox.run_many(healthy) if healthy else [])
        return [FAULT if self._fails(call) else next(results) for call in calls]

    async def fork(self, session: str, n: int) -> list[str]:
        return await self.sandbox.fork(session, n)  # type: ignore[attr-defined]

    async def close_session(self, session: str) -> None:
        close = getattr(self.sandbox, "close_session", None)
        if close:
            await close(session)

    def _fails(self, call: Call) -> bool:
        return derive_seed(call.seed or 0, "fault", call.code, call.stdin) % 10_000 < 10_000 * self.share
