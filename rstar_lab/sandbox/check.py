"""Reports which isolation layers this machine supports, and the risk of each missing one."""

import asyncio
import logging
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rstar_lab.common.errors import UserError
from rstar_lab.sandbox.gvisor import GvisorPool, find_runsc
from rstar_lab.sandbox.runtime import landlock
from rstar_lab.sandbox.runtime.isolation import LAYERS
from rstar_lab.sandbox.supervisor_pool import SupervisorPool

log = logging.getLogger(__name__)

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


def risk(layer: str, missing: Collection[str]) -> str:
    """Return the guarantees that need a layer and do not hold on a machine without the layers in `missing`."""
    lost = [name for name, needed in GUARANTEES.items() if layer in set().union(*needed) and not holds(name, missing)]
    return f"not guaranteed: {'; '.join(lost)}" if lost else "no guarantee is lost"


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
        else:
            # Without root, programs can only run under the user's own id; the namespaces still separate them.
            accepted = name == "user_id" and os.geteuid() != 0
            reported.append(Layer(label, accepted, missing[name], risk(name, missing)))
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
        kernel = Layer("gVisor kernel", True, f"present, {find_runsc()}", "")
        return [kernel, *(layer for layer in layers(missing) if layer.name == "cgroup")]
    return layers(missing)
