"""A process that answers the tools of `rstar-lab mcp`, with limits of memory and time.

Texts in a run can make an assistant ask for a query that DuckDB can neither interrupt nor keep below its memory limit.
"""

import contextlib
import faulthandler
import json
import os
import resource
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from rstar_lab.runs import RunStoreError

MEMORY = 3 * 2**30  # bytes that a call may allocate
MAX_ANSWER = 2**24


class ToolProcess:
    """Client of the process, which starts with the first call and again after a call that took too much.

    Args:
        runs_dir: Folder of runs.
        query_s: Time limit of a query. A call of `query` ends the process a little later, if the query could not be interrupted.
        call_s: Time limit of the other calls.
    """

    def __init__(self, runs_dir: Path, query_s: float, call_s: float):
        self._arguments = [str(runs_dir), str(query_s), str(call_s)]
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._process: subprocess.Popen | None = None

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of a tool. Raises RunStoreError with the reason if it fails."""
        with self._lock:
            connection = self._connection or self._start()
            try:
                connection.send_bytes(json.dumps([name, arguments]).encode())
                answer = json.loads(connection.recv_bytes(MAX_ANSWER))
            except (EOFError, OSError) as error:
                self.close()
                raise RunStoreError(
                    f"{name} was ended, because it needs more time or memory than a call may take; limit it to a run and its steps"
                ) from error
        if "error" in answer:
            raise RunStoreError(answer["error"])
        return dict(answer["result"])

    def close(self) -> None:
        """End the process."""
        if self._process and self._connection:
            self._connection.close()
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None

    def _start(self) -> Connection:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), *self._arguments]
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=sys.stderr, env=os.environ | threads
        )
        theirs.close()  # then the end of the process is the end of the connection
        return self._connection


def serve(connection: Connection, runs_dir: Path, query_s: float, call_s: float) -> None:
    """Answer calls until the other end of the connection closes."""
    from rstar_lab.exchange.mcp_server import CELL_CHARS, MESSAGE_CHARS, RunReports, bounded

    reports = RunReports(runs_dir, query_s)
    used = getattr(psutil.Process().memory_info(), "data", 0)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = used + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    with Path(os.devnull).open("w") as nowhere, contextlib.suppress(EOFError):
        while True:
            name, arguments = json.loads(connection.recv_bytes())
            faulthandler.dump_traceback_later(query_s + 5 if name == "query" else call_s, exit=True, file=nowhere)
            answer: dict[str, Any]
            try:
                found = getattr(reports, name)(**arguments)
                answer = {"result": bounded(found, MESSAGE_CHARS if name == "transcript" else CELL_CHARS)}
            except Exception as error:  # the reason of any failure is the answer
                answer = {"error": str(error) or type(error).__name__}
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
