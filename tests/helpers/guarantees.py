"""The table of docs/sandbox-boundary.md: what the sandbox guarantees where it can run."""

from rstar_lab.sandbox.check import GUARANTEES, LAYERS, NOT_PROVIDED, holds

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


def table() -> str:
    """Return a Markdown table of all guarantees in all modes, for the documentation."""
    rows = [["a program", *MODES], ["---"] * (1 + len(MODES))]
    rows += [
        [name, *("yes" if holds(name, missing) else "**no**" for missing in MODES.values())] for name in GUARANTEES
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
