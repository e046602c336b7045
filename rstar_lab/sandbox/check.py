"""Which layers of the boundary this machine gives, and what a missing one leaves open."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rstar_lab.sandbox.runtime.isolation import LAYERS
from rstar_lab.sandbox.supervisor_pool import SupervisorPool

_LEAVES_OPEN = {
    "cgroup": "a call's memory is watched, not bounded: one that eats it fast can take its neighbours with it",
    "pid_namespace": "programs see and may signal other processes of the same user; ends are found by search",
    "mount_namespace": "Landlock alone keeps programs from the host's files, and they have no folder to write to",
    "network_namespace": "abstract sockets are shared with the host; seccomp still refuses every network socket",
    "ipc_namespace": "System V shared memory of the host can be reached, and outlives a call",
    "uts_namespace": "programs see the host's name",
    "user_namespace": "programs share the per-user limits of the kernel with each other",
    "user_id": "programs run as the user who started the sandbox; only the other layers keep them from that user's files",
    "private_proc": "programs have no /proc, or the zygotes'",
    "landlock": "the read-only view alone keeps programs from files and abstract sockets",
    "seccomp": "programs may make every system call: the kernel's whole surface is open to them",
}
# A user's own id is what an ordinary user has: the namespaces make up for it.
_ACCEPTED = {"user_id"}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. detail: how it is given, or why not; leaves_open: what its lack means, empty where it is present."""

    name: str
    present: bool
    detail: str
    leaves_open: str


def layers(missing: dict[str, str]) -> list[Layer]:
    """From what the zygotes found missing."""
    found = []
    for name in [*LAYERS, *sorted(set(missing) - set(LAYERS))]:
        label = name.replace("_", " ")
        if name not in missing:
            found.append(Layer(label, True, "present", ""))
        elif name in _ACCEPTED and os.geteuid() != 0:
            found.append(Layer(label, True, missing[name], _LEAVES_OPEN[name]))
        else:
            found.append(Layer(label, False, missing[name], _LEAVES_OPEN.get(name, "unknown")))
    return found


async def _probe() -> dict[str, str]:
    pool = SupervisorPool(1)
    await pool.start()
    try:
        return dict(pool.missing)
    finally:
        await pool.close()


def check() -> list[Layer]:
    """Start a sandbox's zygotes, see which layers took hold, end them. Raises RuntimeError where they do not start."""
    with ThreadPoolExecutor(1) as thread:
        # Of its own, so that a notebook, whose event loop runs, may ask too.
        return layers(thread.submit(lambda: asyncio.run(_probe())).result())
