"""The code tools: Python programs and notebook cells, run in the sandbox, and a sandbox that fails on purpose."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.rl.renderers.paper import CODE_TOOL, PaperRenderer
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.tools.base import RETRIES, ForkFailed, ToolResult, tool_name
from rstar_lab.sandbox.call import Call, CallResult, ForkError

FAULT = CallResult(Outcome.SANDBOX_ERROR, "", "", None, 0.0)


class Sandbox(Protocol):
    """The part of LocalSandbox and SandboxClient that the tools use; for sessions also `fork` and `close_session`."""

    async def run_many(self, calls: Sequence[Call]) -> list[CallResult]: ...


@dataclass(frozen=True, slots=True)
class CodeTool:
    """The tools `python` (paper) and `python_released`, which run a program with its standard input in a new process, and
    `jupyter`, which runs cells in one session per trajectory.

    sessions: session of each trajectory that has run a cell; None: programs without a session.
    """

    sandbox: Sandbox
    timeout_s: float | None = None
    memory_mb: int | None = None
    schema: dict[str, Any] = field(default_factory=lambda: CODE_TOOL)
    render: Callable[[CallResult], str] = PaperRenderer.result_text
    sessions: dict[str, str] | None = None

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult:
        call = self._call(arguments["code"], arguments.get("input", ""), seed, traj_id)
        return await run_code(self.sandbox, call, self.render)

    def _call(self, code: str, stdin: str, seed: int, traj_id: str) -> Call:
        session = None if self.sessions is None else self.sessions.setdefault(traj_id, traj_id)
        return Call(code, stdin, seed, self.timeout_s, self.memory_mb, session=session)

    async def check(self, seed: int) -> str:
        """Run a program that prints a number. Returns what is wrong, or "" if nothing is. Infrastructure failures are no error here."""
        number, traj_id = seed % 9973, f"check-{seed}"
        program = f"print({number} * 2 + {'int(input())' if self.sessions is None else 1})"
        result = await run_code(self.sandbox, self._call(program, "1\n", seed, traj_id), lambda result: result.stdout)
        await self.close(traj_id)
        if result.outcome in INFRASTRUCTURE_FAILURES or result.text.strip() == str(2 * number + 1):
            return ""
        return f"the sandbox ran {program!r} and returned {result.outcome} {result.text!r}; expected {2 * number + 1}"

    async def fork(self, traj_id: str, copy: str) -> None:
        """Give `copy` a copy of the session. A program keeps no state."""
        if self.sessions is None or traj_id not in self.sessions:
            return
        try:
            (self.sessions[copy],) = await self.sandbox.fork(self.sessions[traj_id], 1)  # type: ignore[attr-defined]
        except (ForkError, ValueError) as error:
            raise ForkFailed(f"{tool_name(self.schema)}: {error}") from error

    async def close(self, traj_id: str) -> None:
        if self.sessions is not None and (session := self.sessions.pop(traj_id, None)):
            await self.sandbox.close_session(session)  # type: ignore[attr-defined]


async def run_code(
    sandbox: Sandbox, call: Call, render: Callable[[CallResult], str] = PaperRenderer.result_text
) -> ToolResult:
    """Run code. Infrastructure failures are retried before the model sees them."""
    for attempt in range(1 + RETRIES):
        (result,) = await sandbox.run_many([call])
        if result.outcome not in INFRASTRUCTURE_FAILURES:
            break
        await asyncio.sleep(0.05 * 2**attempt)
    return ToolResult(result.outcome, render(result), call.code, result.queue_s, result.duration_s)


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
        await self.sandbox.close_session(session)  # type: ignore[attr-defined]

    def _fails(self, call: Call) -> bool:
        return derive_seed(call.seed or 0, "fault", call.code, call.stdin) % 10_000 < 10_000 * self.share
