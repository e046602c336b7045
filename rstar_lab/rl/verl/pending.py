"""Record what the rollouts of this process wait for, and since when, for the watchdog's report on a hung step."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rstar_lab.rl.tools.base import Tool, ToolResult


class PendingOperations:
    """Operations in progress, by trajectory: generation, tools or reward."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], float] = {}

    @contextmanager
    def of(self, traj_id: str, operation: str) -> Iterator[None]:
        self._open[traj_id, operation] = time.monotonic()
        try:
            yield
        finally:
            self._open.pop((traj_id, operation), None)

    def report(self) -> dict[str, Any]:
        """Return {"host", "pid", "waits": {operation: {"count", "longest_s", "traj_id"}}}."""
        now, waits = time.monotonic(), dict[str, dict[str, Any]]()
        for (traj_id, operation), since in list(self._open.items()):
            entry = waits.setdefault(operation, {"count": 0, "longest_s": 0.0, "traj_id": traj_id})
            entry["count"] += 1
            if now - since > entry["longest_s"]:
                entry["longest_s"], entry["traj_id"] = round(now - since, 1), traj_id
        return {"host": socket.gethostname(), "pid": os.getpid(), "waits": waits}


PENDING = PendingOperations()


class WatchedTool:
    """A tool whose running calls are recorded as pending operations."""

    def __init__(self, tool: Tool):
        self.tool, self.schema = tool, tool.schema

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult:
        with PENDING.of(traj_id, "tools"):
            return await self.tool(arguments, seed=seed, traj_id=traj_id)

    async def close(self, traj_id: str) -> None:
        await self.tool.close(traj_id)
