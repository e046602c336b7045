"""Zygotes: interpreters with libraries already imported, from which supervisors are forked.

The embedding program is never forked, because it has threads and may have loaded torch. It starts one process with exec, the
launcher, which creates the PID namespace and forks the zygote "bare". That zygote creates the other namespaces and forks the
zygote "numpy", which forks "sympy", and so on. Each imports more libraries than the previous one.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
from collections import deque

from rstar_lab.sandbox.runtime import cgroup, isolation, kernel, pressure, procfs, program, rootfs
from rstar_lab.sandbox.runtime.protocol import FOR_SESSION, HEAD, KILL_PROGRAM, PING, READY, REFUSED, Request
from rstar_lab.sandbox.runtime.supervisor import Supervisor, run_supervisor

COMMON = ["bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools"]
COMMON += ["heapq", "itertools", "math", "operator", "random", "re", "statistics", "string", "time", "typing"]
SCIPY = ["integrate", "interpolate", "linalg", "ndimage", "optimize", "signal", "sparse", "spatial", "special", "stats"]
TIERS = {
    "bare": COMMON,
    "numpy": ["numpy", "numpy.random", "numpy.linalg"],
    "sympy": ["sympy"],
    "scipy": [f"scipy.{part}" for part in SCIPY],
}
# Signals that Python ignores in every program.
PYTHON_IGNORES = {signal.SIGPIPE, signal.SIGXFSZ}
# Name of the tier of modules that the user chose.
PRELOAD = "preload"
# Typical programs of each tier, run once in the zygote: they do lazy imports and fill caches. A first `solve` takes 48 CPU ms in a
# process that has only imported sympy, and 16 CPU ms after another equation was solved.
WARM_UP_PROGRAMS = {
    "bare": """
import collections, fractions, itertools, math, random, re
print(sum(range(10)), f"{math.pi:.3f}", [x * x for x in range(5)], {1: 2}, "a,b".split(","))
fractions.Fraction(1, 3) + 1, math.gcd(12, 18), list(itertools.permutations(range(3))), collections.Counter("ab")
""",
    "numpy": """
import numpy as np
a = np.arange(12.0).reshape(3, 4)
print(a.sum(), a @ a.T, np.linalg.det(np.eye(3)), np.linalg.solve(np.eye(2), np.ones(2)), np.sqrt(a).mean(), a > 1)
np.random.rand(3), np.linspace(0, 1, 5), np.array([1, 2, 3]), np.roots([1, -3, 2])
""",
    "sympy": """
from sympy import *
x, y, n = symbols("x y n")
print(solve(x**2 - 5*x + 6, x), solve([x + y - 3, x - y - 1], [x, y]), factor(x**2 - 1), expand((x + 1)**3), solve(x**3 - x, x))
print(simplify(sin(x)**2 + cos(x)**2 + sqrt(8)), diff(x**2 * sin(x), x), integrate(x * exp(x), x), limit(sin(x)/x, x, 0))
print(factorint(1001), gcd(12, 18), isprime(97), sqrt(8), N(pi, 10), Matrix([[2, 1], [1, 2]]).eigenvals(), latex(x**2 / 2))
print(summation(n, (n, 1, y)), binomial(10, 3), series(exp(x), x, 0, 4), Eq(x, 1), divisors(12), solveset(x**2 - 4, x))
print(Matrix([[1, 2], [3, 4]]).det(), Rational(1, 3) + 1)
""",
    "scipy": """
from scipy import integrate, optimize
optimize.brentq(lambda x: x * x - 2, 0, 2), integrate.quad(lambda x: x, 0, 1), optimize.minimize(lambda x: x @ x, [1.0])
""",
}

_DRY = Request(None, False, False, 10.0, 2.0, 256, 64, 64, 16, 1024, 1024)


class Zygote:
    """The zygote of one tier. Forks a supervisor for each socket received on its control socket."""

    def __init__(
        self, control: socket.socket, tier: str, layers: isolation.Isolation, usage: pressure.Pressure | None
    ) -> None:
        self.control = control
        self.tier = tier
        self.isolation = layers
        self.pressure = usage
        self.group = group = usage.sandbox if usage else None
        # Supervisors are almost always asleep. When they wake up, they must run before the programs that they end.
        self.supervisor_group = group.child("supervisors") if group else None
        if self.supervisor_group:
            self.supervisor_group.set_weight(cgroup.BOOSTED)
        self.supervisors: dict[int, str] = {}
        self.zygotes: set[int] = set()
        self.stale: set[str] = set()
        self.refused: deque[socket.socket] = deque(maxlen=64)

    def serve(self) -> None:
        """Fork a supervisor for every received socket, until the control socket closes."""
        # Orphans of a killed supervisor become children of this process, and SIGCHLD wakes it.
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        woken, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(woken, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == woken:
                    os.read(woken, 4096)
                    self._reap_children()
                    continue
                data, fds = self._receive()
                if not data:
                    return
                number = int.from_bytes(data[:4], "little")
                if fds:
                    sock = socket.socket(fileno=fds[0])
                    if number & FOR_SESSION and self.pressure and self.pressure.refuses_sessions():
                        sock.send(HEAD.pack(0, REFUSED))
                        # Kept open: on a closed socket, a write of the other side could fail before it reads this message.
                        self.refused.append(sock)
                    else:
                        self._fork(sock, number & ~FOR_SESSION)
                elif number == PING:
                    self.control.send(b".")
                else:
                    self._kill(number)

    def _receive(self) -> tuple[bytes, list[int]]:
        """Return the next message (a supervisor's number, 4 bytes) and its descriptors; b"" after the last one."""
        with contextlib.suppress(ConnectionResetError):  # the other side closed with messages unread
            data, fds, _flags, _address = socket.recv_fds(self.control, 4, 1)
            return data, fds
        return b"", []

    def _kill(self, number: int) -> None:
        """Kill a supervisor that did not end by itself. Its processes become orphans and are then killed too.

        With KILL_PROGRAM, kill its program: the supervisor may wait for memory of the group that both are in (version 2).
        """
        name = f"{self.tier}-{number & ~KILL_PROGRAM}"
        supervisors = {pid for pid, its_name in self.supervisors.items() if its_name == name}
        if not number & KILL_PROGRAM:
            for pid in supervisors:
                procfs.kill(pid)
        elif supervisors and self.group and self.group.version == 2:
            group = self.group.child(name)
            group.kill(supervisors)
            group.close()

    def _fork(self, sock: socket.socket, number: int) -> None:
        """Fork a supervisor. If the fork fails, close its socket; the pool then treats the supervisor as dead."""
        name = f"{self.tier}-{number}"
        group = None
        try:
            group = self.group.child(name) if self.group else None
            pid = os.fork()
        except OSError as error:
            os.write(2, f"sandbox: cannot fork a supervisor: {error}\n".encode())
            sock.close()
            self.stale.add(name)
            if group:
                group.close()
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.control.close()
            kernel.run_and_exit(
                run_supervisor, sock, self.isolation, group, self.supervisor_group, self.pressure, number
            )
        self.supervisors[pid] = name
        sock.close()
        if group:
            group.close()

    def _reap_children(self) -> None:
        """Reap supervisors that ended, kill orphans of killed ones, and remove their control groups."""
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if pid in self.supervisors:
                    self.stale.add(self.supervisors.pop(pid))
                    if self.pressure:
                        self.pressure.crowds.mark(pid, False)
        for pid in procfs.children(os.getpid()):
            if pid not in self.supervisors and pid not in self.zygotes:
                procfs.kill(pid)
        if self.group:
            self.stale = {name for name in self.stale if not self.group.remove(name)}


def import_all(modules: list[str]) -> str:
    """Import modules. Returns the error message of the first one that cannot be imported; "" if all can."""
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return ""


def run_zygotes(
    controls: list[socket.socket],
    names: list[str],
    layers: isolation.Isolation,
    usage: pressure.Pressure | None,
    details: str,
) -> None:
    """Fork the zygotes of the other tiers and become that of the first tier. Returns when its control socket closes.

    details: text sent with the ready message of the first tier.
    """
    zygote = Zygote(controls[0], names[0], layers, usage)
    if names[0] == PRELOAD:
        layers.prepare_imports(_DRY)
    failure = import_all(TIERS[names[0]])
    # Run typical code once, so that programs need not repeat first-time work. Before the fork: the other zygotes have it too.
    program.open_streams()
    program.warm_up(WARM_UP_PROGRAMS[names[0]])
    if names[1:]:
        pid = os.fork()
        if pid == 0:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            controls[0].close()
            kernel.run_and_exit(run_zygotes, controls[1:], names[1:], layers, usage, "")
        zygote.zygotes.add(pid)
    for other in controls[1:]:
        other.close()
    isolation.freeze_heap()
    with contextlib.suppress(BrokenPipeError):
        controls[0].sendall(f"{'-' if failure else '+'}{details or failure}\n".encode())
        zygote.serve()


def run_first_zygote(
    controls: list[socket.socket], missing: isolation.Missing, root: bool, usage: pressure.Pressure | None, scratch: str
) -> None:
    """Set up the isolation layers, test them once, and become the first zygote."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    readable = rootfs.readable()
    isolation.create_namespaces(missing)
    layers = isolation.Isolation(missing, root, readable, scratch=scratch)
    layers.prepare()
    for layer, error in isolation.dry_run(layers, _DRY).items():
        missing.setdefault(layer, error)
    run_zygotes(controls, list(TIERS), layers, usage, json.dumps(missing))


def main(parent: int, workers: int, scratch: str, readable: list[str], preload: list[str], fds: list[int]) -> None:
    """Run the launcher: start the first zygote, and end all zygotes when the embedding program (`parent`) ends.

    The launcher stays outside of the zygotes' PID namespace. At the end it removes their control groups and `scratch`, the folder for
    programs without a private file system; if it is killed, the next sandbox does. readable, preload: `supervisor_pool.View`.
    """
    rootfs.additional += readable
    if preload:
        TIERS[PRELOAD], WARM_UP_PROGRAMS[PRELOAD] = preload, ""
    # Programs inherit signals that are ignored or blocked, for example by `nohup`. Ctrl-C stays ignored (supervisor_pool.py).
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals() - {signal.SIGINT, *PYTHON_IGNORES}:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # A new session, because the embedding program handles Ctrl-C in the terminal.
    os.setsid()
    if os.getppid() != parent:
        os.rmdir(scratch)
        return
    parent_fd = os.pidfd_open(parent)
    controls = [socket.socket(fileno=fd) for fd in fds]
    stopping, stop = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop, b"."))
    missing: isolation.Missing = {}
    cgroup.remove_stale_groups()
    group, usage = cgroup.create(f"{cgroup.PREFIX}-{os.getpid()}"), None
    if group is None:
        missing["cgroup"] = "this user cannot create a control group with a memory and a pids controller"
    else:
        pressure.limit_sandbox(group)
        group.set_weight(cgroup.NORMAL * workers)
        usage = pressure.Pressure(group)
    root = isolation.create_pid_namespace(missing)
    pid = os.fork()
    if pid == 0:
        kernel.run_and_exit(run_first_zygote, controls, missing, root, usage, scratch)
    for control in controls:
        control.close()
    poller = select.poll()
    for fd in (parent_fd, stopping, os.pidfd_open(pid)):
        poller.register(fd, select.POLLIN)
    poller.poll()
    kernel.kill_child(pid)
    import shutil  # not before: every program, a fork, would have its pages

    shutil.rmtree(scratch, ignore_errors=True)
    if group:
        group.close()
    cgroup.remove_stale_groups()  # its own, and those of a killed sandbox whose processes were not gone at the start


def run_guest(tier: str) -> None:
    """Be the first process in a gVisor container: import the libraries of a tier, send READY, and serve the socket on stdin."""
    # Layers that the container replaces or that gVisor does not support.
    outside = [layer for layer in isolation.LAYERS if layer not in ("user_id", "seccomp")]
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=os.dup(0))
    for name, modules in TIERS.items():
        import_all(modules)
        if name == tier:
            break
    layers = isolation.Isolation(dict.fromkeys(outside, "outside of gVisor"), True, [])
    layers.prepare()
    program.open_streams()
    isolation.freeze_heap()
    channel.sendall(HEAD.pack(0, READY))
    Supervisor(channel, layers, None, None, 0).serve()
