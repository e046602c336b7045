"""Zygotes: small interpreters with libraries already imported, from which keepers are forked.

One process is started by exec (the embedding program, with its threads and its torch, is never forked). It opens the
namespaces, becomes the bare zygote, forks the numpy zygote, which forks the sympy one, and so on, each importing more.
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys

from rstar_lab.sandbox.box import kernel
from rstar_lab.sandbox.box.keeper import keep

COMMON = (
    "bisect cmath collections copy dataclasses datetime decimal fractions functools heapq itertools json math operator"
    " random re statistics string time typing"
).split()
SCIPY = "integrate interpolate linalg ndimage optimize signal sparse spatial special stats".split()
TIERS = {
    "bare": COMMON,
    "numpy": ["numpy", "numpy.random", "numpy.linalg"],
    "sympy": ["sympy"],
    "scipy": [f"scipy.{part}" for part in SCIPY],
}
READY, MISSING = b"+", b"-"


def warm(modules: list[str]) -> bool:
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError:
        return False
    return True


def serve(control: socket.socket) -> None:
    """Fork a keeper for each socket that comes."""
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        try:
            data, fds, _flags, _address = socket.recv_fds(control, 1, 1)
        except InterruptedError:
            continue
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not data:
            os._exit(0)
        sock = socket.socket(fileno=fds[0])
        if os.fork() == 0:
            control.close()
            keep(sock)
        sock.close()


def tiers(controls: list[socket.socket], names: list[str]) -> None:
    """Become the zygote of the first name, after forking that of the others; never return."""
    present = warm(TIERS[names[0]])
    if names[1:] and os.fork() == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        controls[0].close()
        tiers(controls[1:], names[1:])
    for other in controls[1:]:
        other.close()
    controls[0].sendall(READY if present else MISSING)
    serve(controls[0])


def main(parent: int, fds: list[int]) -> None:
    """Watch over the zygotes from outside their PID namespace: they end when we do, and we when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    parent_fd = os.pidfd_open(parent)
    if os.getppid() != parent:
        return
    controls = [socket.socket(fileno=fd) for fd in fds]
    wake, stop = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    kernel.unshare(kernel.CLONE_NEWPID)
    first = os.fork()
    if first == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        tiers(controls, list(TIERS))
    for control in controls:
        control.close()
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop, b"x"))
    poller = select.poll()
    for fd in (parent_fd, wake, os.pidfd_open(first)):
        poller.register(fd, select.POLLIN)
    poller.poll()
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)


def entry() -> None:
    main(int(sys.argv[1]), [int(fd) for fd in sys.argv[2:]])
