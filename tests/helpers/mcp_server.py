"""An MCP server for tests: `python mcp_server.py`, or `python mcp_server.py PORT` for streamable HTTP."""

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("test")
counts = {"value": 0}


@server.tool()
def count(step: int = 1) -> str:
    """Add to a counter of this session and return it.

    step: what to add.
    """
    counts["value"] += step
    return str(counts["value"])


@server.tool()
def divide(a: float, b: float | None = None) -> str:
    """Divide a by b."""
    return str(a / (b or 0))


@server.tool()
def hang() -> str:
    """Never return."""
    time.sleep(60)
    return "late"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
