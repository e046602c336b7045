"""What the sandbox guarantees, given the isolation layers that a machine supports."""

from collections.abc import Collection

from rstar_lab.sandbox.runtime.isolation import LAYERS

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
    "timers and queued signals limited by the kernel": [{"user_namespace"}],
    "leaves others their pipe buffers and descriptors in flight": [{"user_id"}],
    "gives way to short calls (CPU weight)": [{"cgroup", "preemption"}],
    "ends with all its processes": [set()],
    "makes no system call to the host's kernel": [{"gvisor"}],
}

# What an isolation does not provide on any machine.
NOT_PROVIDED: dict[str, set[str]] = {"namespaces": {"gvisor"}, "gvisor": {"preemption"}}

_NAMESPACES = {layer for layer in LAYERS if "namespace" in layer}
# Where the sandbox runs -> the layers that are missing there.
MODES: dict[str, set[str]] = {
    "root": set(),
    "root, no control groups": {"cgroup"},
    "user, delegated control group": {"user_id"},
    "user": {"cgroup", "user_id"},
    "user, no user namespaces": {"cgroup", "user_id", "private_proc", *_NAMESPACES},
}
MODES = {mode: missing | NOT_PROVIDED["namespaces"] for mode, missing in MODES.items()}
MODES["gVisor, root"] = NOT_PROVIDED["gvisor"]


def holds(guarantee: str, missing: Collection[str]) -> bool:
    """Return whether a guarantee holds on a machine without the layers in `missing`."""
    return any(not needed & set(missing) for needed in GUARANTEES[guarantee])


def table() -> str:
    """Return a Markdown table of all guarantees in all modes, for the documentation."""
    rows = [["a program", *MODES], ["---"] * (1 + len(MODES))]
    rows += [
        [name, *("yes" if holds(name, missing) else "**no**" for missing in MODES.values())] for name in GUARANTEES
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
