"""A Ray cluster on this machine, with as many raylets as asked for: for `profile="laptop"`, for verl on a CPU, for tests."""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rstar_lab.errors import UserError
from rstar_lab.processes import JOB_VARIABLE, end_processes

START_S = 300
# One for all clusters of this process: Ray's clients read the token once and keep it.
TOKEN = secrets.token_hex(32)
ATTEMPTS = 3
# What Ray's daemons grant each other in time, stretched for a busy machine.
PATIENCE = {
    "RAY_raylet_start_wait_time_s": str(START_S),
    "RAY_agent_register_timeout_ms": str(1000 * START_S),
    "RAY_worker_register_timeout_seconds": str(START_S),
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(START_S),
    "RAY_worker_niceness": "0",  # 15 by default: beside anything else that computes they would hardly move
    # Workers started ahead have no runtime environment, which all of ours ask for: they would only take the cores.
    "RAY_prestart_worker_first_driver": "0",
}
# Asks the control store, since the job API needs longer to come up; in a process of its own, since Ray reads once, when it is
# first imported, whether there are tokens.
WATCH = """
import sys, time
from ray._raylet import GcsClient
while True:
    try:
        nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=20)
    except Exception:  # the client raises its own kinds, and gRPC's
        nodes = {}
    if sum(node.state == 0 for node in nodes.values()) >= int(sys.argv[2]):
        break
    time.sleep(0.2)
"""
# Chosen here: the agents of two raylets would fight for the one port with a fixed number.
PORTS = ("dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export", "runtime-env-agent")


class LocalRay:
    """`nodes` raylets with a job API that asks for a token; a context manager, nothing of it outlives the block.

    cpus, gpus: what each raylet claims to have. dashboard: with the job API.
    address: of the job API; environment: what a client or driver needs. The token lies in a folder only this user can read.
    """

    def __init__(self, nodes: int = 1, *, cpus: int = 2, gpus: int = 0, dashboard: bool = True):
        self.nodes, self.cpus, self.gpus, self.dashboard = nodes, cpus, gpus, dashboard
        self._mark = f"ray-{secrets.token_hex(4)}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for attempt in range(ATTEMPTS):
            try:
                self._open()
                return self
            except UserError:
                self.close()
                if attempt + 1 == ATTEMPTS:
                    raise
            except BaseException:
                self.close()
                raise
        raise AssertionError

    def _open(self) -> None:
        # Ray's socket paths must stay under 108 bytes.
        self.folder, self._processes = Path(tempfile.mkdtemp(prefix="r", dir="/tmp")), []
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        self.port, web = _free_port(), _free_port()
        self.address = f"http://127.0.0.1:{web}"
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ADDRESS": f"127.0.0.1:{self.port}",
        }
        self._outer = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        self._start(
            "--head", f"--port={self.port}", f"--dashboard-port={web}", "--dashboard-host=127.0.0.1",
            f"--include-dashboard={str(self.dashboard).lower()}", f"--temp-dir={self.folder}",
            "--no-monitor", f"--ray-client-server-port={_free_port()}",  # no autoscaler; the port is fixed otherwise
        )  # fmt: skip
        # The API answers before the head is a node of its own cluster, and until then nobody can join.
        self.wait_for_nodes(1)
        for _ in range(self.nodes - 1):
            self.add_node()
        self.wait_for_nodes(self.nodes)

    def add_node(self) -> subprocess.Popen[bytes]:
        """One more raylet; the process that keeps it is returned, so that a test can kill it."""
        return self._start(f"--address=127.0.0.1:{self.port}")

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"node-{len(self._processes)}.log").open("wb")
        with log:
            ports, node = {name: _free_port() for name in PORTS}, secrets.token_hex(28)
            threading.Thread(target=self._tell_port, args=(node, ports["dashboard-agent-listen"]), daemon=True).start()
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, "--node-ip-address=127.0.0.1",
                 *(f"--{name}-port={port}" for name, port in ports.items()),
                 f"--num-cpus={self.cpus}", f"--num-gpus={self.gpus}", "--disable-usage-stats", "--block"],
                env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
                | PATIENCE | {JOB_VARIABLE: self._mark, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": node},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def _tell_port(self, node: str, port: int) -> None:
        """Write the file by which a node's agent would tell its raylet the port it was given.

        A raylet waits 15 s for that file, whatever the settings, and dies without it: too short on a busy machine.
        """
        session = self.folder / "session_latest"
        deadline = time.monotonic() + START_S
        while not session.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(OSError):
            (session.resolve() / f"dashboard_agent_listen_port_{node}").write_text(str(port))

    def wait_for_nodes(self, count: int) -> None:
        """Wait until so many nodes are alive. Raises UserError with the end of a daemon's log."""
        watcher = subprocess.Popen(
            [sys.executable, "-c", WATCH, f"127.0.0.1:{self.port}", str(count)], stdin=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_S
        try:
            while watcher.poll() is None:
                words = self._last_words()
                dead = "Check failed" in words or any(process.poll() is not None for process in self._processes)
                if dead or time.monotonic() > deadline:
                    raise UserError(f"Ray did not come up with {count} nodes within {START_S} s: {words}")
                time.sleep(0.1)
        finally:
            watcher.kill()
            watcher.wait()

    def _last_words(self) -> str:
        logs = [*self.folder.glob("node-*.log"), *self.folder.glob("session_latest/logs/raylet.err")]
        return " | ".join(f"{path.name}: {path.read_text(errors='replace')[-600:]}" for path in logs)

    def close(self) -> None:
        """End every process of this cluster, and of no other."""
        for name, value in getattr(self, "_outer", {}).items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
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


def _end_with_parent() -> None:
    """Whoever opened the cluster may be killed, and then nobody closes it; told to end, Ray ends its own processes."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
