"""The code tools: Python programs and notebook cells, run in the sandbox, and a sandbox that fails on purpose."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.rl.renderers.paper import CODE_TOOL, JUPYTER_TOOL, render_tool_result
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.tools.base import RETRIES, ForkFailed, ToolResult, tool_name
from rstar_lab.sandbox.call import Call, CallResult, ForkError

FAULT = CallResult(Outcome.SANDBOX_ERROR, "", "", None, 0.0)


class Sandbox(Protocol):
    """The part of LocalSandbox and SandboxClient that the tools use."""

    async def run_many(self, calls: Sequence[Call]) -> list[CallResult]: ...


@dataclass(frozen=True, slots=True)
class CodeTool:
    """The tools `python` (paper) and `python_released`: run a program with its standard input in a new process."""

    sandbox: Sandbox
    timeout_s: float | None = None
    memory_mb: int | None = None
    schema: dict[str, Any] = field(default_factory=lambda: CODE_TOOL)
    render: Callable[[CallResult], str] = render_tool_result

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult:
        call = Call(arguments["code"], arguments["input"], seed, self.timeout_s, self.memory_mb)
        return await run_code(self.sandbox, call, self.render)

    async def check(self, seed: int) -> str:
        """Run a program that prints a number. Returns what is wrong, or "" if nothing is."""
        number = seed % 9973
        call = Call(f"print({number} * 2 + int(input()))", "1\n", seed, self.timeout_s, self.memory_mb)
        return await check_code(self.sandbox, call, str(2 * number + 1))

    async def fork(self, traj_id: str, copy: str) -> None:
        """Do nothing: a program keeps no state."""

    async def close(self, traj_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class JupyterTool:
    """The tool `jupyter`: runs cells in one session per trajectory."""

    sandbox: Sandbox
    timeout_s: float | None = None
    memory_mb: int | None = None
    schema: dict[str, Any] = field(default_factory=lambda: JUPYTER_TOOL)
    render: Callable[[CallResult], str] = render_tool_result
    sessions: dict[str, str] = field(default_factory=dict)  # session of each trajectory that has run a cell

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult:
        session = self.sessions.setdefault(traj_id, traj_id)
        call = Call(arguments["code"], "", seed, self.timeout_s, self.memory_mb, session=session)
        return await run_code(self.sandbox, call, self.render)

    async def fork(self, traj_id: str, copy: str) -> None:
        if traj_id not in self.sessions:
            return
        try:
            (self.sessions[copy],) = await self.sandbox.fork(self.sessions[traj_id], 1)  # type: ignore[attr-defined]
        except (ForkError, ValueError) as error:
            raise ForkFailed(f"{tool_name(self.schema)}: {error}") from error

    async def check(self, seed: int) -> str:
        """Run a cell that prints a number. Returns what is wrong, or "" if nothing is."""
        number, session = seed % 9973, f"check-{seed}"
        call = Call(f"print({number} * 2 + 1)", "", seed, self.timeout_s, self.memory_mb, session=session)
        problem = await check_code(self.sandbox, call, str(2 * number + 1))
        await self.close(session)
        return problem

    async def close(self, traj_id: str) -> None:
        session = self.sessions.pop(traj_id, traj_id)
        close_session = getattr(self.sandbox, "close_session", None)
        if close_session:
            await close_session(session)


async def run_code(
    sandbox: Sandbox, call: Call, render: Callable[[CallResult], str] = render_tool_result
) -> ToolResult:
    """Run code. Infrastructure failures are retried before the model sees them."""
    for attempt in range(1 + RETRIES):
        (result,) = await sandbox.run_many([call])
        if result.outcome not in INFRASTRUCTURE_FAILURES:
            break
        await asyncio.sleep(0.05 * 2**attempt)
    return ToolResult(result.outcome, render(result), call.code, result.queue_s, result.duration_s)


async def check_code(sandbox: Sandbox, call: Call, expected: str) -> str:
    """Return an error message if the code does not print `expected`, else "". Infrastructure failures are no error here."""
    result = await run_code(sandbox, call, lambda result: result.stdout)
    if result.outcome in INFRASTRUCTURE_FAILURES or result.text.strip() == expected:
        return ""
    return f"the sandbox ran {call.code!r} and returned {result.outcome} {result.text!r}; expected {expected}"


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
