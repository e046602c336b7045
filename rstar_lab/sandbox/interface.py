"""The interface of LocalSandbox and SandboxClient."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from typing import Self

from rstar_lab.sandbox.call import Call, CallResult, Output


class Sandbox(ABC):
    """Runs model-written code on this machine (LocalSandbox) or on a service (SandboxClient).

    Errors of the code are outcomes of the result, not exceptions.
    """

    async def start(self) -> Self:
        """Prepare for calls and return the sandbox. Optional: the first call does it otherwise."""
        return self

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
        """Run code and return its result.

        Args:
            code: Python program; its last expression becomes `CallResult.value`.
            stdin: Standard input.
            seed: Seed of random numbers. Default: different in every call.
            timeout_s: CPU time limit in seconds. Default: that of the sandbox.
            memory_mb: Memory limit of all its processes, in MiB. Default: that of the sandbox.
            session: Name of a session whose variables the program sees. Default: none.

        Raises:
            ValueError: For a limit above its maximum.
            RuntimeError: If the sandbox is closed or cannot start.
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

        A streamed call is not retried. Close the generator to cancel the call. Errors: as for `run`.

        Args:
            code: The program.
            stdin: Its standard input.
            seed: Seeds the program's random numbers. None: fresh ones in every call.
            timeout_s: Limit of time. Default: the sandbox's.
            memory_mb: Limit of memory. Default: the sandbox's.
            session: Name of a session whose state the program uses.
        """
        return self.stream_call(Call(code, stdin, seed, timeout_s, memory_mb, session))

    async def run_many(self, calls: Iterable[Call]) -> list[CallResult]:
        """Run calls concurrently.

        Args:
            calls: The calls.

        Returns:
            Results in the order of the calls.
        """
        return list(await asyncio.gather(*map(self.run_call, calls)))

    @abstractmethod
    async def run_call(self, call: Call) -> CallResult:
        """Run a call; see `run`.

        Args:
            call: The call.
        """

    @abstractmethod
    def stream_call(self, call: Call) -> AsyncGenerator[Output | CallResult, None]:
        """Run a call; see `stream`.

        Args:
            call: The call.
        """

    @abstractmethod
    async def close_session(self, name: str) -> None:
        """End a session's interpreter.

        Args:
            name: Name of the session. An unknown name is ignored.
        """

    @abstractmethod
    async def fork(self, session: str, n: int) -> list[str]:
        """Fork the live interpreter of a session.

        A copy has the state of the original: variables, modules, and a copy of the working folder. Memory is shared
        until it is written. Threads and child processes of the original are not copied, and random numbers differ
        between copies. A copy can outlive the original, and exists only in memory, like any session.

        Args:
            session: Name of the session.
            n: Number of copies, in [1, max_sessions).

        Returns:
            Names of the new sessions. Close each with `close_session`.

        Raises:
            ValueError: If the session does not exist or `n` is out of range.
            ForkError: If the interpreter cannot be forked: it does not answer, or a limit on memory, processes or sessions is reached.
        """
