"""`isolation: gvisor`: runs each call and each session in a gVisor container of its own.

A container imports the libraries of its tier in advance, runs one call or one session, and ends. Inside it runs the same
supervisor as with `isolation: namespaces`. Its messages go over a socket, which is the container's standard input.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.common.temporary import LockedFolder
from rstar_lab.hardware.ends import wait_or_kill
from rstar_lab.sandbox.call import failure
from rstar_lab.sandbox.call_request import Answer
from rstar_lab.sandbox.runtime import cgroup, kernel, pressure, protocol, rootfs
from rstar_lab.sandbox.runtime.zygote import TIERS
from rstar_lab.sandbox.supervisor_pool import (
    END_S,
    ENVIRONMENT,
    START_TIMEOUT_S,
    OnEvent,
    SupervisorConnection,
    SupervisorDied,
    View,
)

RUNSC = "runsc"
INSTALL = "https://gvisor.dev/docs/user_guide/install"
_SOURCE = "/opt/rstar_lab"
_BOOT = f"""import sys
sys.path.insert(0, {_SOURCE!r})
from rstar_lab.sandbox.runtime.zygote import run_guest
sys.path[0] = ""
tier = sys.argv[1]
sys.argv = ["main.py"]
run_guest(tier)
"""
# MiB and processes of the host that a container uses in addition to its program: gVisor's kernel and file server.
OWN_MEMORY_MB, OWN_PROCESSES = 512, 256


def find_runsc() -> str:
    """Return the path of runsc. Raises UserError if it is not installed."""
    path = shutil.which(RUNSC)
    if path is None:
        raise UserError(
            f"isolation: gvisor requires `{RUNSC}`, which is not in the PATH of this machine; install it ({INSTALL}), "
            "or use isolation: namespaces"
        )
    return path


def bundle_config(root: Path, tier: str, view: View) -> dict[str, Any]:
    """Return the OCI configuration of a container.

    root: folder with the small files and links of its file system.
    """
    folders = [*rootfs.readable(), *view.readable]
    binds = {path: path for path in folders if not Path(path).is_symlink()}
    binds[f"{_SOURCE}/rstar_lab"] = str(Path(__file__).parents[1])
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        *({"destination": path, "type": "tmpfs", "source": "tmpfs"} for path in ("/tmp", "/dev/shm")),
        *(
            {"destination": inside, "type": "bind", "source": outside, "options": ["rbind", "ro"]}
            for inside, outside in sorted(binds.items())
        ),
    ]
    # The supervisor requires these capabilities to run the program as another user. Programs have none.
    capabilities = ["CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN", "CAP_SYS_RESOURCE"]
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "args": [sys.executable, "-c", _BOOT, tier],
            "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }


class Container(SupervisorConnection):
    """The connection to the supervisor of one container."""

    process: subprocess.Popen[bytes]
    group: cgroup.Group | None

    async def call(self, message: bytes, wall_s: float, on_event: OnEvent | None = None) -> Answer:
        """Run a call; see SupervisorConnection. The outcome is `memory` if the OOM killer ended the container."""
        request = protocol.unpack_limits(message)
        if self.group:
            self.group.limit(request.memory_mb + OWN_MEMORY_MB, request.processes + OWN_PROCESSES)
        try:
            return await super().call(message, wall_s, on_event)
        except SupervisorDied:
            if self.group and self.group.out_of_memory():
                return Answer(failure(Outcome.MEMORY), False, False)
            raise


class GvisorPool:
    """Starts containers, which wait for one call each. Has the methods of SupervisorPool.

    Raises UserError if runsc is not installed, or for `preload`, which is not supported.
    """

    def __init__(self, workers: int, view: View = View()) -> None:
        if view.preload:
            raise UserError("isolation: gvisor does not support preload; use namespaces")
        self.missing: dict[str, str] = {}
        self._runsc = find_runsc()
        self._workers = workers
        self._view = view
        self._containers: set[Container] = set()
        self._idle: dict[str, list[Container]] = {tier: [] for tier in TIERS}
        self._starting: dict[str, set[asyncio.Task[None]]] = {tier: set() for tier in TIERS}
        self._ending: set[asyncio.Task[None]] = set()
        self._numbers = count(1)
        self._group: cgroup.Group | None = None
        self._closed = False

    @property
    def alive(self) -> bool:
        return not self._closed

    async def start(self) -> None:
        """Start the first container. Raises RuntimeError if it cannot be started."""
        cgroup.remove_stale_groups()
        self._locked = LockedFolder("gvisor")
        self._folder = self._locked.path
        self._group = cgroup.create(f"{cgroup.PREFIX}-{self._folder.name}")
        if self._group:
            pressure.limit_sandbox(self._group)
        else:
            self.missing["cgroup"] = "this user cannot create a control group with a memory and a pids controller"
        root = self._folder / "root"
        for path, data in rootfs.files().items():
            (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            (root / path[1:]).write_bytes(data)
        for path, target in rootfs.links().items():
            if not target.startswith((rootfs.SCRATCH, "/proc")):
                (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
                (root / path[1:]).symlink_to(target)
        try:
            self._idle["bare"].append(await self.start_supervisor("bare"))
        except SupervisorDied as error:
            log = self._folder / "runsc.log"
            lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            await self.close()
            raise RuntimeError(
                f"{self._runsc} could not start a container: {lines[-1] if lines else 'no message'}"
            ) from error

    async def wait_for_tier(self, tier: str) -> str:
        return tier

    async def acquire(self, tier: str) -> Container:
        """Return an idle container, or start one. Raises SupervisorDied."""
        idle = self._idle[tier]
        idle[:] = [container for container in idle if container.alive]
        container = idle.pop() if idle else None
        while len(idle) + len(self._starting[tier]) < self._workers:
            self._prepare(tier)
        return container or await self.start_supervisor(tier)

    def _prepare(self, tier: str) -> None:
        """Start a container for a later call in the background."""

        async def start() -> None:
            self._idle[tier].append(await self.start_supervisor(tier))

        task = asyncio.create_task(start())
        self._starting[tier].add(task)
        task.add_done_callback(self._starting[tier].discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def release(self, container: SupervisorConnection) -> None:
        """Close the connection. The container then ends; it is killed if it does not."""
        container.close()

    async def start_supervisor(self, tier: str, *, session: bool = False) -> Container:
        """Start a container and wait until its supervisor can accept a call. Raises SupervisorDied if the container ends first."""
        number = next(self._numbers)
        bundle = self._folder / f"bundle-{number}"
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(bundle_config(self._folder / "root", tier, self._view)))
        container = Container(tier, tier, number)
        container.group = self._group.child(str(number)) if self._group else None
        if self._group and container.group:
            container.group.limit_cpus(pressure.CALL_SHARE * pressure.available_cpus(self._group))
        ours, theirs = socket.socketpair()
        with theirs:
            container.process = self._run(bundle, number, theirs, container.group)
        self._containers.add(container)
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[bool] = loop.create_future()

        def on_change(started: bool) -> None:
            if not ready.done():
                ready.set_result(started)
            if not started:
                self._end(container)

        container.on_ready = lambda: on_change(True)
        container.on_lost = lambda: on_change(False)
        ours.setblocking(False)
        await loop.create_unix_connection(lambda: container, sock=ours)
        try:
            await asyncio.wait([ready], timeout=START_TIMEOUT_S)
            if ready.done() and ready.result():
                return container
        finally:
            if not ready.done():
                container.close()
        raise SupervisorDied

    def _run(
        self, bundle: Path, number: int, stdin: socket.socket, group: cgroup.Group | None
    ) -> subprocess.Popen[bytes]:
        options = ["--root", str(self._folder / "state"), "--network", "none", "--ignore-cgroups"]
        options += ["--log", str(self._folder / "runsc.log")]
        if os.geteuid() != 0:
            options.append("--rootless")
        command = [self._runsc, *options, "run", "--bundle", str(bundle), f"rstar-{number}"]

        def isolate() -> None:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            if group:
                for folder in set(group.folders.values()):
                    kernel.write_file("cgroup.procs", b"0", folder)

        with (self._folder / "output.log").open("ab") as output:
            return subprocess.Popen(
                command, stdin=stdin.fileno(), stdout=output, stderr=output, start_new_session=True, preexec_fn=isolate
            )

    def _end(self, container: Container) -> None:
        """Handle a closed connection: wait until the container ends, and kill it after END_S seconds."""
        self._containers.discard(container)
        task = asyncio.create_task(asyncio.to_thread(self._reap, container))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _reap(self, container: Container) -> None:
        wait_or_kill(container.process, END_S)
        shutil.rmtree(self._folder / f"bundle-{container.number}", ignore_errors=True)
        if container.group and self._group:
            container.group.close()
            self._group.remove(str(container.number))

    async def close(self) -> None:
        """End all containers."""
        self._closed = True
        for tasks in self._starting.values():
            for task in list(tasks):
                task.cancel()
        for container in list(self._containers):
            container.on_lost = lambda: None
            container.close()
            self._end(container)
        await asyncio.gather(*self._ending)
        if self._group:
            cgroup.destroy(self._group)
        self._locked.cleanup()
