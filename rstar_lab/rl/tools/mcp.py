"""Tools of MCP servers (Model Context Protocol): every tool of a server, with its own schema.

In `rl.tools`, `mcp+stdio:COMMAND ARGUMENTS` starts a server and uses its standard input and output, and `mcp+http://HOST/PATH`
(or `mcp+https`) connects to one that runs. Each rollout has its own session: with `mcp+stdio`, its own server process. MCP
servers are trusted: they run outside the sandbox.
"""

import asyncio
import contextlib
import json
import logging
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from rstar_lab.common.errors import UserError, install_hint
from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.tools.base import ToolResult
from rstar_lab.rl.tools.user import ToolUnavailable, run_with_retries

_INVALID_PARAMS = -32602  # JSON-RPC

log = logging.getLogger(__name__)


def load_mcp_tools(address: str, time_limit_s: float) -> list["McpTool"]:
    """Return all tools of a server. time_limit_s: limit of the start of the server, and of each call.

    Raises UserError if the package mcp is missing or the server cannot be reached.
    """
    server = McpServer(address, time_limit_s)
    with ThreadPoolExecutor(1) as thread:  # this thread may run an event loop
        schemas = thread.submit(asyncio.run, server.schemas()).result()
    if not schemas:
        raise UserError(f"rl.tools: {address}: the server offers no tools")
    return [McpTool(server, schema) for schema in schemas]


class McpServer:
    """A server and its open sessions, by traj_id."""

    def __init__(self, address: str, time_limit_s: float):
        self.address, self.time_limit_s = address, time_limit_s
        self.sessions: dict[str, _Session] = {}
        try:
            from mcp import StdioServerParameters
        except ModuleNotFoundError:
            raise UserError(f"rl.tools: {address} requires mcp: {install_hint('mcp')}") from None
        self.target: Any = address.removeprefix("mcp+")
        if address.startswith("mcp+stdio:"):
            command = shlex.split(address.removeprefix("mcp+stdio:"))
            if not command:
                raise UserError(f"rl.tools: {address}: a command is missing after mcp+stdio:")
            self.target = StdioServerParameters(command=command[0], args=command[1:])

    async def schemas(self) -> list[dict[str, Any]]:
        """Return the function schemas of the server's tools. They are read in a separate session."""
        session = _Session(self)
        try:
            client = await session.client()
            async with asyncio.timeout(self.time_limit_s):
                listed = await client.list_tools()
        except Exception as error:
            raise UserError(f"rl.tools: {self.address}: its tools could not be listed: {_reason(error)}") from error
        finally:
            await session.close()
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": {"properties": {}} | tool.input_schema,
                },
            }
            for tool in listed.tools
        ]

    async def call(self, name: str, arguments: dict[str, Any], traj_id: str) -> ToolResult:
        """Call a tool in the session of a rollout. Raises ToolUnavailable if the server fails before its first answer."""
        session = self.sessions.get(traj_id)
        if session is None:
            session = self.sessions[traj_id] = _Session(self)
        began = time.monotonic()
        limit = asyncio.timeout(self.time_limit_s)
        try:
            client = await session.client()
            async with limit:
                answer = await client.call_tool(name, arguments)
            session.answered = True
            outcome = Outcome.EXCEPTION if answer.is_error else Outcome.OK
            text = "\n".join(_text(block) for block in answer.content)
        except Exception as error:
            if getattr(error, "code", getattr(getattr(error, "error", None), "code", None)) == _INVALID_PARAMS:
                return ToolResult(Outcome.INVALID_ARGUMENTS, str(error))
            await self.close(traj_id)
            if limit.expired():
                outcome, text = Outcome.TIMEOUT, "TimeoutError: the tool ran past its time limit; its state is lost."
            elif session.answered:
                log.warning("%s ended during rollout %s: %s", self.address, traj_id, _reason(error))
                outcome = Outcome.SANDBOX_ERROR
                text = "The tool's server ended; its state is lost. This is no fault of the call."
            else:
                raise ToolUnavailable(f"{self.address}: {_reason(error)}") from error
        return ToolResult(outcome, text, run_s=time.monotonic() - began)

    async def close(self, traj_id: str) -> None:
        """End the session of a rollout, if it has one."""
        if session := self.sessions.pop(traj_id, None):
            await session.close()


class McpTool:
    """One tool of a server, as a `Tool`."""

    def __init__(self, server: McpServer, schema: dict[str, Any]):
        self.server, self.schema = server, schema

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult:
        name = self.schema["function"]["name"]
        result = await run_with_retries(lambda: self.server.call(name, arguments, traj_id))
        return replace(result, code=json.dumps(arguments, sort_keys=True, ensure_ascii=False))

    async def close(self, traj_id: str) -> None:
        await self.server.close(traj_id)


class _Session:
    """A connection to a server. One asyncio task opens and closes it, as the mcp library requires."""

    def __init__(self, server: McpServer):
        self.server, self.answered = server, False
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def client(self) -> Any:
        """Return the client when the server is ready. Raises the error of the start, or TimeoutError after the time
        limit."""
        async with asyncio.timeout(self.server.time_limit_s):
            return await asyncio.shield(self._opened)

    async def close(self) -> None:
        self._closing.set()
        done, _ = await asyncio.wait([self._task], timeout=5.0)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=5.0)

    async def _run(self) -> None:
        from mcp import Client

        try:
            async with Client(self.server.target) as client:
                self._opened.set_result(client)
                await self._closing.wait()
        except Exception as error:
            if not self._opened.done():
                self._opened.set_exception(error)
                with contextlib.suppress(Exception):
                    self._opened.exception()  # else asyncio logs an error if nobody waits for the future
            else:
                log.debug("closing %s: %s", self.server.address, _reason(error))


def _text(block: Any) -> str:
    return block.text if block.type == "text" else f"[{block.type}]"


def _reason(error: BaseException) -> str:
    """Return the first cause in a group of errors, as one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
