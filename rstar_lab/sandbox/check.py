"""Reports which isolation layers this machine supports, and the risk of each missing one."""

import asyncio
import logging
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rstar_lab.common.errors import UserError
from rstar_lab.sandbox.gvisor import GvisorPool, runsc_version
from rstar_lab.sandbox.runtime import landlock
from rstar_lab.sandbox.runtime.isolation import LAYERS
from rstar_lab.sandbox.supervisor_pool import SupervisorPool

_LEAVES_OPEN = {
    "cgroup": "memory (with that of sockets) is checked every 50 ms, not limited by the kernel: a program that allocates fast can "
    "harm other calls; CPU time is not limited either",
    "pid_namespace": "programs see other processes of the same user and can signal them",
    "mount_namespace": "only Landlock protects the host's files, and programs have no private folder to write to",
    "network_namespace": "abstract sockets are shared with the host; seccomp still refuses every network socket",
    "ipc_namespace": "programs can use System V shared memory of the host, which outlives a call",
    "uts_namespace": "programs see the host's name",
    "user_namespace": "programs share the kernel's per-user limits with each other",
    "user_id": "programs run as the user who started the sandbox: only the other layers protect that user's files, and one program "
    "can use up that user's limits on pipe buffers, descriptors in flight and epoll watches",
    "private_proc": "programs have no /proc, or see the zygotes' /proc",
    "landlock": "only the read-only root file system protects files, and abstract sockets are shared",
    "landlock_abi": "without namespaces, only newer versions of Landlock keep calls from signalling each other and truncating files",
    "seccomp": "programs can make every system call",
}
log = logging.getLogger(__name__)
# Without root, programs can only run under the user's own id; the namespaces still separate them.
_ACCEPTED = {"user_id"}


Pool = SupervisorPool | GvisorPool  # these classes have the same methods
POOLS: dict[str, type[SupervisorPool] | type[GvisorPool]] = {"namespaces": SupervisorPool, "gvisor": GvisorPool}


def check_isolation(isolation: str) -> str:
    """Return `isolation`. Raises UserError for an unknown one."""
    if isolation not in POOLS:
        raise UserError(f"isolation: {isolation!r} must be one of {', '.join(POOLS)}")
    return isolation


class LayersMissing(UserError):
    """An isolation layer is missing and the sandbox is strict."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One isolation layer. detail: why it is missing; leaves_open: the risk if it is missing, else empty."""

    name: str
    present: bool
    detail: str
    leaves_open: str


def layers(missing: dict[str, str]) -> list[Layer]:
    """Return all layers, given the missing ones (name -> reason) as the zygotes report them."""
    reported = []
    for name in [*LAYERS, *sorted(set(missing) - set(LAYERS))]:
        label = name.replace("_", " ")
        if name not in missing:
            detail = f"present, ABI {landlock.abi()}" if name == "landlock" else "present"
            reported.append(Layer(label, True, detail, ""))
        elif name in _ACCEPTED and os.geteuid() != 0:
            reported.append(Layer(label, True, missing[name], _LEAVES_OPEN[name]))
        else:
            reported.append(Layer(label, False, missing[name], _LEAVES_OPEN.get(name, "unknown")))
    return reported


def check_layers(missing: dict[str, str], *, strict: bool) -> None:
    """Log a warning for each missing layer. Raises LayersMissing instead if `strict`."""
    absent = [layer for layer in layers(missing) if not layer.present]
    if absent and strict:
        names = "; ".join(f"{layer.name} ({layer.detail})" for layer in absent)
        raise LayersMissing(
            f"the sandbox is strict and this machine does not support: {names}; `rstar-lab sandbox check` prints the risks"
        )
    for layer in absent:
        log.warning("sandbox runs without %s (%s): %s", layer.name, layer.detail, layer.leaves_open)


async def _probe(isolation: str) -> dict[str, str]:
    pool = POOLS[isolation](1)
    try:
        await pool.start()
        return dict(pool.missing)
    finally:
        await pool.close()


def check(isolation: str = "namespaces") -> list[Layer]:
    """Start the sandbox, return its isolation layers, and stop it.

    Raises RuntimeError if it does not start, UserError for an unknown isolation or if runsc is not installed.
    """
    check_isolation(isolation)
    with ThreadPoolExecutor(1) as thread:
        # In another thread, because a notebook already runs an event loop in this one.
        missing = thread.submit(lambda: asyncio.run(_probe(isolation))).result()
    if isolation == "gvisor":
        kernel = Layer("gVisor kernel", True, f"present, runsc {runsc_version()}", "")
        return [kernel, *(layer for layer in layers(missing) if layer.name == "cgroup")]
    return layers(missing)


# A guarantee holds if all layers of one of its alternatives are present.
GUARANTEES: dict[str, list[set[str]]] = {
    "cannot read or change files of the host": [{"mount_namespace"}, {"landlock"}],
    "cannot reach a network": [{"network_namespace"}, {"seccomp"}],
    "cannot see or signal processes of others": [{"pid_namespace", "private_proc"}],
    "shares no sockets and no memory with concurrent calls": [
        {"network_namespace", "ipc_namespace", "mount_namespace"}
    ],
    "has a user id of its own": [{"user_id"}],
    "uses only listed system calls": [{"seccomp"}],
    "number of processes limited by the kernel": [{"cgroup"}, {"user_namespace"}],
    "memory of all its processes limited by the kernel": [{"cgroup"}],
    "memory of its sockets and pipes limited by the kernel": [{"cgroup"}],
    "CPU time limited by the kernel, so that other work runs": [{"cgroup"}],
    "CPU time of its orphans counted by the kernel": [{"cgroup"}],
    "timers and queued signals limited by the kernel": [{"user_namespace"}],
    "leaves others their pipe buffers, descriptors in flight and epoll watches": [{"user_id"}],
    "gives way to short calls (CPU weight)": [{"cgroup", "preemption"}],
    "ends with all its processes": [set()],
    "makes no system call to the host's kernel": [{"gvisor"}],
}

# What an isolation does not provide on any machine.
NOT_PROVIDED: dict[str, set[str]] = {"namespaces": {"gvisor"}, "gvisor": {"preemption"}}


def holds(guarantee: str, missing: Collection[str]) -> bool:
    """Return whether a guarantee holds on a machine without the layers in `missing`."""
    return any(not needed & set(missing) for needed in GUARANTEES[guarantee])
