"""The fork server and the worker processes that compare formulas. Runs as a script, started by `pool`.

    caller -- socket -- fork server (imports sympy once) -- forks -- workers, one comparison at a time each

A worker arms a kernel timer of CPU time before each comparison. The default action of the timer ends the process, so it also
stops C code that never returns to Python. The fork server reports to the caller how a worker ended: by its timer (the
comparison has used its CPU time), by a crash of its own, or otherwise, for example because the machine ran out of memory.
Workers end with the fork server, and the fork server ends with the caller, also if the caller is killed.
"""

import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

CPU_S = 0.75  # seconds of CPU time for one comparison; ordinary ones need 0.005, the slowest of 657 recorded cases 0.25
MEMORY_BYTES = 2 << 30
COMPARISONS_PER_WORKER = 1_000  # sympy's caches grow without limit
NOT_INSTALLED = 3  # exit code of the fork server

# Replies of one byte. A worker sends the first four, capital letters if it ends afterwards; the server sends the last two.
EQUAL, DIFFERENT, EQUAL_LAST, DIFFERENT_LAST = b"1", b"0", b"I", b"O"
READY, OUT_OF_TIME, CRASHED = b"h", b"T", b"C"
REPLY_OF_SIGNAL = {int(signal.SIGPROF): OUT_OF_TIME, int(signal.SIGSEGV): CRASHED, int(signal.SIGABRT): CRASHED}


def run_server(control_fd: int, caller: int) -> None:
    """Fork a worker for each socket that arrives over the control socket, until the caller ends."""
    import gc

    control = socket.socket(fileno=control_fd)
    try:
        from rstar_lab.verify import equality, symbolic
    except ImportError:
        os._exit(NOT_INSTALLED)
    equality.equal(r"\lim_{x\to0}\frac{\sin x}{x}", "1", symbolic)  # imports what sympy loads late, before the forks
    gc.collect()
    gc.freeze()
    ended_r, ended_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ended_w, warn_on_full_buffer=False)
    connections: dict[int, int] = {}  # worker -> our copy of its socket
    while True:
        # The socket closes when the caller ends, except if a fork of the caller holds a copy. So check the parent too.
        ready, _, _ = select.select([control.fileno(), ended_r], [], [], 1.0)
        if os.getppid() != caller:
            os._exit(0)
        if ended_r in ready:
            os.read(ended_r, 4096)
        _report_ended(connections)
        if control.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os._exit(0)
        server = os.getpid()
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (*connections.values(), ended_r, ended_w):
                os.close(descriptor)
            control.close()
            _run_worker(socket.socket(fileno=fds[0]), server)
        connections[child] = fds[0]


def _report_ended(connections: dict[int, int]) -> None:
    """Tell the callers of ended workers how they ended, and close our copies of their sockets."""
    while connections:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        connection = connections.pop(pid, None)
        if connection is None:
            continue
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        reply = REPLY_OF_SIGNAL.get(ended_by)
        try:
            if reply:
                os.write(connection, reply)
        except OSError:  # the caller does not listen any more
            pass
        os.close(connection)


def _run_worker(connection: socket.socket, server: int) -> None:
    import ctypes
    import resource

    from rstar_lab.verify import equality, symbolic

    # PR_SET_PDEATHSIG: end with the parent. The fork server has one thread, so its thread is the process.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.sendall(READY)
    requests = connection.makefile("rb")
    for count in range(1, COMPARISONS_PER_WORKER + 1):
        line = requests.readline()
        if not line:
            break
        candidate, answer, cpu_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        reusable = True
        try:
            equal = equality.equal(candidate, answer, symbolic)
        except (RecursionError, MemoryError):
            equal, reusable = False, False
        except Exception:  # sympy raises errors of all kinds
            equal = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        if reusable and count < COMPARISONS_PER_WORKER:
            connection.sendall(EQUAL if equal else DIFFERENT)
        else:
            connection.sendall(EQUAL_LAST if equal else DIFFERENT_LAST)
            break
    os._exit(0)


if __name__ == "__main__":
    root = str(Path(__file__).parents[2])
    sys.path.insert(0, root)  # the package of the caller, whatever else is installed
    import rstar_lab.verify  # noqa: F401

    sys.path.remove(root)
    sys.modules["rstar_lab"].__path__ = [str(Path(__file__).parents[1])]
    run_server(int(sys.argv[1]), int(sys.argv[2]))
