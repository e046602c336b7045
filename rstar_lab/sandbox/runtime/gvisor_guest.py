"""First process in a gVisor container: imports the libraries of a tier and supervises one call or one session."""

import os
import socket

from rstar_lab.sandbox.runtime import isolation, program, zygote
from rstar_lab.sandbox.runtime.protocol import HEAD, READY
from rstar_lab.sandbox.runtime.supervisor import Supervisor

# Layers that the container replaces or that gVisor does not support.
_OUTSIDE = [layer for layer in isolation.LAYERS if layer not in ("user_id", "seccomp")]


def main(tier: str) -> None:
    """Send READY after the imports, then serve the socket that is this process's standard input."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=os.dup(0))
    for name, modules in zygote.TIERS.items():
        zygote.import_all(modules)
        if name == tier:
            break
    layers = isolation.Isolation(dict.fromkeys(_OUTSIDE, "outside of gVisor"), True, [])
    layers.prepare()
    program.open_streams()
    isolation.freeze_heap()
    channel.sendall(HEAD.pack(0, READY))
    Supervisor(channel, layers, None, None, 0).serve()
