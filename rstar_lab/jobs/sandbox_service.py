"""The sandbox service of one job: Redis, the HTTP service in front of it, and workers on this node.

    python -m rstar_lab.jobs.sandbox_service JOB_FOLDER --host ADDRESS [--workers N] [--all-ray-nodes]

It writes the service's URL, token and Redis address to JOB_FOLDER/sandbox.json (only the owner can read it) and runs until
SIGTERM. Workers on other nodes are started by the Slurm script, or with --all-ray-nodes as one Ray actor per node.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError, exit_with_message
from rstar_lab.common.temporary import LockedFolder
from rstar_lab.hardware.processes import free_port, wait_or_kill, wait_until
from rstar_lab.jobs.store import JobFolder, write_exports

ADDRESS_FILE = "sandbox.json"
EXPORTS_FILE = "sandbox.env"  # its variables, for the batch script
REDIS_VARIABLE, TOKEN_VARIABLE = "RSTAR_LAB_REDIS_URL", "RSTAR_LAB_SANDBOX_TOKEN"
START_TIMEOUT_S = 180.0
MAX_RESTARTS = 10

Command = Callable[[], subprocess.Popen[bytes]]


class SandboxService:
    """Starts the processes of the service, and restarts a process that exits."""

    def __init__(self, folder: JobFolder, host: str, workers: int):
        self.folder, self.host, self.workers = folder, host, workers
        self.data = LockedFolder("sandbox")
        self.environment = {TOKEN_VARIABLE: os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(24)}
        self.own_redis = REDIS_VARIABLE not in os.environ
        self.redis_port, self.http_port = free_port(host), free_port(host)
        self.password = secrets.token_hex(24)
        self.environment[REDIS_VARIABLE] = (
            os.environ.get(REDIS_VARIABLE) or f"redis://:{self.password}@{host}:{self.redis_port}/0"
        )
        self.url = f"http://{host}:{self.http_port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.restarts = 0

    @property
    def commands(self) -> dict[str, Command]:
        """Commands of the processes by name, in the order in which they are started."""
        commands: dict[str, Command] = {"redis-server": self._start_redis} if self.own_redis else {}
        serve = ["sandbox", "serve", "--host", self.host, "--port", str(self.http_port)]
        commands["service"] = lambda: run_cli(serve, self.environment)
        if self.workers:
            commands["workers"] = lambda: start_workers(self.workers, self.environment)
        return commands

    def start(self) -> None:
        """Start all processes and write the address file. Raises UserError if one exits or does not answer."""
        for name, command in self.commands.items():
            self.processes[name] = command()
        if not wait_until(self._answers, START_TIMEOUT_S):
            raise UserError(f"sandbox service: {self.url} does not answer after {START_TIMEOUT_S:.0f} s")
        content = {"url": self.url, "environment": self.environment}
        self.folder.write(ADDRESS_FILE, content, mode=0o600)
        write_exports(self.folder.path / EXPORTS_FILE, self.environment)

    def supervise(self) -> None:
        """Restart processes that exit. Raises UserError after MAX_RESTARTS restarts."""
        while True:
            self._restart_ended()
            time.sleep(1)

    def _restart_ended(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is None:
                continue
            self.restarts += 1
            if self.restarts > MAX_RESTARTS:
                raise UserError(f"sandbox service: {name} exited {MAX_RESTARTS} times; last code {process.returncode}")
            print(f"sandbox service: {name} exited with {process.returncode}; starting it again", flush=True)
            self.processes[name] = self.commands[name]()

    def close(self) -> None:
        """End all processes and remove the address file."""
        for name in (ADDRESS_FILE, EXPORTS_FILE):
            (self.folder.path / name).unlink(missing_ok=True)
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            wait_or_kill(process, 5)
        self.data.cleanup()

    def _start_redis(self) -> subprocess.Popen[bytes]:
        # The configuration goes through stdin: command lines are visible to every user of the node.
        lines = [
            f"bind {self.host}", f"port {self.redis_port}", f"requirepass {self.password}", f"dir {self.data.path}",
            "appendonly yes", "appendfsync everysec", "save \"\"", "maxmemory-policy noeviction",
        ]  # fmt: skip
        if not shutil.which("redis-server"):
            raise UserError(
                "sandbox.redis: redis-server is not installed on this node; install it, use the image, or set "
                f"{REDIS_VARIABLE} to a running Redis"
            )
        process = subprocess.Popen(["redis-server", "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert process.stdin is not None
        process.stdin.write("\n".join(lines).encode())
        process.stdin.close()
        return process

    def _answers(self) -> bool:
        """Whether the service answers. It exits if it starts before Redis is ready, and is started again."""
        self._restart_ended()
        with contextlib.suppress(OSError):
            return bool(read_status(self.url, self.environment[TOKEN_VARIABLE]))
        return False


def run_cli(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start `rstar-lab ARGUMENTS` of this interpreter."""
    return subprocess.Popen(
        [sys.executable, "-m", "rstar_lab.cli", *arguments], env={**os.environ, **environment}, stdin=subprocess.DEVNULL
    )


def start_workers(count: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the sandbox workers of this node."""
    return run_cli(["sandbox", "worker", "--workers", str(count)], environment)


def read_status(url: str, token: str) -> dict[str, Any]:
    """Return {"queue", "num_workers"} of a running service. Raises OSError."""
    request = urllib.request.Request(f"{url}/status", headers={"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return dict(json.loads(answer.read(2**20)))


def wait_for_service(folder: JobFolder, process: subprocess.Popen[bytes] | None = None) -> dict[str, Any]:
    """Return the content of sandbox.json once the service has a worker.

    process: the service, if the caller started it. Raises UserError if it exits, or after START_TIMEOUT_S.
    """
    content: dict[str, Any] = {}

    def has_worker() -> bool:
        if process is not None and process.poll() is not None:
            raise UserError(f"the sandbox service exited with {process.returncode}")
        content.update(folder.read(ADDRESS_FILE, dict) or {})
        with contextlib.suppress(OSError):
            return bool(content and read_status(content["url"], content["environment"][TOKEN_VARIABLE])["num_workers"])
        return False

    if not wait_until(has_worker, START_TIMEOUT_S):
        raise UserError(f"the sandbox service has no worker after {START_TIMEOUT_S:.0f} s")
    return content


def start_ray_workers(count: int, environment: dict[str, str]) -> list[Any]:
    """Start workers on every other node of the Ray cluster; they end with this process. Returns the actors."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(log_to_driver=False)

    class Workers:
        def start(self, environment: dict[str, str]) -> None:
            self.process = start_workers(count, environment)

    here = ray.get_runtime_context().get_node_id()
    actors = []
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] != here:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            actor: Any = ray.remote(Workers).options(num_cpus=0, scheduling_strategy=where).remote()
            # Passed as an argument, because Ray's dashboard shows the runtime environment.
            ray.get(actor.start.remote(environment), timeout=START_TIMEOUT_S)
            actors.append(actor)
    return actors


def own_address() -> str:
    """Return the address at which other nodes reach this node."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect(("10.255.255.255", 1))  # sends nothing: it only selects the outgoing interface
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="", help="address to listen on; default: this node's")
    parser.add_argument("--workers", type=int, default=0, help="workers on this node")
    workers_everywhere = "start the same number of workers on every other node of the Ray cluster"
    parser.add_argument("--all-ray-nodes", action="store_true", help=workers_everywhere)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    service = SandboxService(JobFolder(arguments.folder), arguments.host or own_address(), arguments.workers)
    with exit_with_message(), contextlib.closing(service):
        service.start()
        actors = start_ray_workers(arguments.workers, service.environment) if arguments.all_ray_nodes else []
        print(f"sandbox service: {service.url}, workers on {len(actors)} other Ray nodes", flush=True)
        service.supervise()


if __name__ == "__main__":
    main()
