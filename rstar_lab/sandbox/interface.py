"""The interface of LocalSandbox and SandboxClient."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Self

from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.sandbox.session_files import SessionFiles
from rstar_lab.sandbox.streaming import Output


class Sandbox(SessionFiles):
    """Runs model-written code on this machine (LocalSandbox) or on a service (SandboxClient).

    Errors of the code are outcomes of the result, not exceptions.
    """

    @abstractmethod
    async def start(self) -> Any:
        """Prepare for calls. Optional: the first call does it otherwise."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release all resources. Closing twice has no effect."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

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
        """Run code and return its result. The arguments are those of `Call`.

        Raises ValueError for a limit above its maximum, and RuntimeError if the sandbox is closed or cannot start.
        """
        return await self.run_call(Call(code, stdin, seed, timeout_s, memory_mb, session))

    def stream(
        self,
        code: str,
        stdin: str = "",
        *,
        seed: int | None = None,
        timeout_s: float | None = None,
        memory_mb: int | None = None,
        session: str | None = None,
    ) -> AsyncGenerator[Output | CallResult, None]:
        """Run code; yield its output while it runs (every 50 to 200 ms), then its result, which contains all output.

        The arguments and errors are those of `run`. A streamed call is not retried. Close the generator to cancel the call.
        """
        return self.stream_call(Call(code, stdin, seed, timeout_s, memory_mb, session))

    async def run_many(self, calls: Iterable[Call]) -> list[CallResult]:
        """Run calls concurrently; results are in the order of the calls."""
        return list(await asyncio.gather(*map(self.run_call, calls)))

    @abstractmethod
    def stream_call(self, call: Call) -> AsyncGenerator[Output | CallResult, None]:
        """Run a call; see `stream`."""

    @abstractmethod
    async def close_session(self, name: str) -> None:
        """End a session's interpreter. An unknown name is ignored."""

    @abstractmethod
    async def fork(self, session: str, n: int) -> list[str]:
        """Fork the live interpreter of a session `n` times; return the names of the new sessions.

        A copy has the state of the original: variables, modules, and a copy of the working folder. Memory is shared until it
        is written. Threads and child processes of the original are not copied, and random numbers differ between copies.
        Close each copy with `close_session`; it can outlive the original. A copy exists only in memory, like any session.

        Raises ValueError if the session does not exist or `n` is not in [1, max_sessions), and ForkError if the interpreter
        cannot be forked: it does not answer, or a limit on memory, processes or sessions is reached.
        """
