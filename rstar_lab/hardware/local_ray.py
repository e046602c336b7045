"""Start a Ray cluster on this machine, with one raylet per simulated node: for `profile="laptop"`, verl on a CPU, and tests."""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

from rstar_lab.common.errors import UserError
from rstar_lab.common.temporary import LockedFolder
from rstar_lab.hardware.processes import JOB_VARIABLE, end_processes, exit_with_parent, free_port

START_TIMEOUT_S = 300
# One token for all clusters of this process, because Ray's clients read the token only once.
TOKEN = secrets.token_hex(32)
ATTEMPTS = 3
# Ray's start-up timeouts, raised for a busy machine.
TIMEOUTS = {
    "RAY_raylet_start_wait_time_s": str(START_TIMEOUT_S),
    "RAY_agent_register_timeout_ms": str(1000 * START_TIMEOUT_S),
    "RAY_worker_register_timeout_seconds": str(START_TIMEOUT_S),
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(START_TIMEOUT_S),
    "RAY_worker_niceness": "0",  # default: 15, with which workers get too little CPU time beside other programs
    # Prestarted workers have no runtime environment, so our jobs cannot use them.
    "RAY_prestart_worker_first_driver": "0",
}
# Queries the control store, which is ready before the job API. In a separate process: Ray reads its token when it is imported.
WAIT_FOR_NODES = """
import sys, time
from ray._raylet import GcsClient
while True:
    try:
        nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=20)
    except Exception:  # the client raises its own exceptions and those of gRPC
        nodes = {}
    if sum(node.state == 0 for node in nodes.values()) >= int(sys.argv[2]):
        break
    time.sleep(0.2)
"""
# Ports are selected here, because the agents of two raylets would otherwise use the same default port.
PORTS = ("dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export", "runtime-env-agent")


class LocalRay:
    """A Ray cluster of `nodes` raylets with token authentication. A context manager: all processes end with the block.

    cpus, gpus: resources that each raylet declares, independent of the machine. dashboard: start the job API.
    Attributes: address (URL of the job API), environment (variables that a client or driver needs; also set in os.environ).
    """

    def __init__(self, nodes: int = 1, *, cpus: int = 2, gpus: int = 0, dashboard: bool = True):
        self.nodes, self.cpus, self.gpus, self.dashboard = nodes, cpus, gpus, dashboard
        self._job_id = f"ray-{secrets.token_hex(4)}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._open()
                break
            except BaseException as error:
                self.close()
                if attempt == ATTEMPTS or not isinstance(error, UserError):
                    raise
        return self

    def _open(self) -> None:
        # Ray's socket paths must stay under 108 bytes.
        self._locked, self._processes = LockedFolder("ray", Path("/tmp")), []
        self.folder = self._locked.path
        # Actors that are killed leave files in their temporary folder. The cache of torch's compiler is kept.
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
        self._folders = {"TMPDIR": tempfile.mkdtemp("", "", self.folder), "TORCHINDUCTOR_CACHE_DIR": cache}
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        self.port, web = free_port(), free_port()
        self.address = f"http://127.0.0.1:{web}"
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ADDRESS": f"127.0.0.1:{self.port}",
        }
        self._saved_environment = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        self._start(
            "--head", f"--port={self.port}", f"--dashboard-port={web}", "--dashboard-host=127.0.0.1",
            f"--include-dashboard={str(self.dashboard).lower()}", f"--temp-dir={self.folder}",
            "--no-monitor", f"--ray-client-server-port={free_port()}",  # no autoscaler; the default port is fixed
        )  # fmt: skip
        # Other nodes can join only after the head is registered as a node.
        self._wait_for_nodes(1)
        for _ in range(self.nodes - 1):
            self._start(f"--address=127.0.0.1:{self.port}")
        self._wait_for_nodes(self.nodes)

    def _start(self, *arguments: str) -> None:
        with (self.folder / f"node-{len(self._processes)}.log").open("wb") as log:
            ports, node = {name: free_port() for name in PORTS}, secrets.token_hex(28)
            agent = (node, ports["dashboard-agent-listen"])
            threading.Thread(target=self._write_agent_port, args=agent, daemon=True).start()
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, "--node-ip-address=127.0.0.1",
                 *(f"--{name}-port={port}" for name, port in ports.items()),
                 f"--num-cpus={self.cpus}", f"--num-gpus={self.gpus}", "--disable-usage-stats", "--block"],
                env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
                | TIMEOUTS | self._folders | {JOB_VARIABLE: self._job_id, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": node},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=exit_with_parent,
            )  # fmt: skip
        self._processes.append(process)

    def _write_agent_port(self, node: str, port: int) -> None:
        """Write the file in which a node's agent reports its port to the raylet.

        A raylet exits if the file does not exist after 15 s. No setting changes this time. A busy agent takes longer.
        """
        session = self.folder / "session_latest"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not session.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(OSError):
            (session.resolve() / f"dashboard_agent_listen_port_{node}").write_text(str(port))

    def _wait_for_nodes(self, count: int) -> None:
        """Wait until `count` nodes are alive. Raises UserError with the end of the daemons' logs."""
        watcher = subprocess.Popen(
            [sys.executable, "-c", WAIT_FOR_NODES, f"127.0.0.1:{self.port}", str(count)], stdin=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while watcher.poll() is None:
                files = [*self.folder.glob("node-*.log"), *self.folder.glob("session_latest/logs/raylet.err")]
                logs = " | ".join(f"{file.name}: {file.read_text(errors='replace')[-600:]}" for file in files)
                dead = "Check failed" in logs or any(process.poll() is not None for process in self._processes)
                if dead or time.monotonic() > deadline:
                    raise UserError(f"Ray did not start {count} nodes within {START_TIMEOUT_S} s: {logs}")
                time.sleep(0.1)
        finally:
            watcher.kill()
            watcher.wait()

    def close(self) -> None:
        """End every process of this cluster, and of no other cluster."""
        for name, value in getattr(self, "_saved_environment", {}).items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        for process in self._processes:
            end_processes(self._job_id, root=process.pid, grace_s=3)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        end_processes(self._job_id, grace_s=0.5)
        self._locked.cleanup()

    def __exit__(self, *_: object) -> None:
        self.close()
