"""A Ray cluster on this machine, with as many raylets as asked for: what `profile="laptop"` and the tests run jobs on."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rstar_lab.errors import UserError
from rstar_lab.jobs.processes import JOB_VARIABLE, end_processes

START_S = 180


class LocalRay:
    """`nodes` raylets with a job API that asks for a token; a context manager, nothing of it outlives the block.

    address: of the job API; environment: what a client needs. The token is written to a folder only this user can read.
    """

    def __init__(self, nodes: int = 1, *, cpus: int = 2):
        self.nodes, self.cpus = nodes, cpus
        self._mark = f"ray-{secrets.token_hex(4)}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        # Ray's socket paths must stay under 108 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        os.environ.update(self.environment)
        self.port, dashboard = _free_port(), _free_port()
        self.address = f"http://127.0.0.1:{dashboard}"
        try:
            self._start(
                "--head", f"--port={self.port}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1",
                "--include-dashboard=true", f"--temp-dir={self.folder}",
            )  # fmt: skip
            # The API answers before the head is a node of its own cluster, and until then nobody can join.
            self.wait_for_nodes(1)
            for _ in range(self.nodes - 1):
                self.add_node()
            self.wait_for_nodes(self.nodes)
        except BaseException:
            self.close()
            raise
        return self

    def add_node(self) -> subprocess.Popen[bytes]:
        """One more raylet; the process that keeps it is returned, so that a test can kill it."""
        return self._start(f"--address=127.0.0.1:{self.port}")

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"node-{len(self._processes)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, "--node-ip-address=127.0.0.1",
                 # Of all of a raylet's ports the only one with a fixed number: two raylets here would fight for it.
                 f"--dashboard-agent-listen-port={_free_port()}",
                 f"--num-cpus={self.cpus}", "--disable-usage-stats", "--block"],
                env=os.environ | self.environment | {JOB_VARIABLE: self._mark, "RAY_raylet_start_wait_time_s": "300"},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def alive(self) -> int:
        """Nodes that are alive; 0 while nobody answers."""
        from ray.util.state import list_nodes

        try:
            return sum(node.state == "ALIVE" for node in list_nodes(address=self.address, timeout=10))
        except Exception:  # the client raises what requests raises, and its own kinds
            return 0

    def wait_for_nodes(self, count: int) -> None:
        """Wait until so many nodes are alive. Raises UserError with the end of a daemon's log."""
        deadline = time.monotonic() + START_S
        while self.alive() < count:
            dead = next((i for i, process in enumerate(self._processes) if process.poll() is not None), None)
            if dead is not None or time.monotonic() > deadline:
                told = (self.folder / f"node-{dead or 0}.log").read_text(errors="replace")[-800:]
                raise UserError(f"Ray has not {count} nodes after {START_S} s: {told}")
            time.sleep(0.5)

    def close(self) -> None:
        """End every process of this cluster, and of no other."""
        for process in self._processes:
            end_processes(self._mark, root=process.pid, grace_s=3)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        end_processes(self._mark, grace_s=0.5)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
