"""The worker processes that compare formulas with sympy. Runs as a script, started by `pool`.

    caller -- one socket per worker -- server (imports sympy once) -- forks a worker for each socket

A worker arms a kernel timer of CPU time before each comparison. The default action of the timer ends the process, so it also
stops C code that never returns to Python. The server then tells the caller how the worker ended and forks the next one for its
socket. If a worker ends otherwise, for example because the machine ran out of memory, its socket closes without a reply.
Workers end with the server, and the server ends when the caller has closed all sockets, also if the caller is killed.
"""

import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path

CPU_S = 0.75  # seconds of CPU time for one comparison; ordinary ones need 0.005, the slowest of 657 recorded cases 0.25
MEMORY_BYTES = 2 << 30
COMPARISONS_PER_WORKER = 1_000  # sympy's caches grow without limit
NOT_INSTALLED, RENEWED = 3, 4  # exit codes of the server without sympy, and of a worker that another one replaces

# Replies of one byte: the first two from a worker, the last two from the server.
EQUAL, DIFFERENT, OUT_OF_TIME, CRASHED = b"1", b"0", b"T", b"C"
_REPLY_OF_END = {RENEWED: b"", -signal.SIGPROF: OUT_OF_TIME, -signal.SIGSEGV: CRASHED, -signal.SIGABRT: CRASHED}


def run_server(connections: list[socket.socket]) -> None:
    """Keep a worker for each connection, until the caller has closed it."""
    try:
        from rstar_lab.verify import equality, symbolic
    except ImportError:
        os._exit(NOT_INSTALLED)
    equality.equal(r"\lim_{x\to0}\frac{\sin x}{x}", "1", symbolic)  # imports what sympy loads late, before the forks
    gc.collect()
    gc.freeze()
    server = os.getpid()
    workers: dict[int, socket.socket] = {}
    waiting = connections
    while waiting or workers:
        for connection in waiting:
            child = os.fork()
            if child == 0:
                for other in {*waiting, *workers.values()} - {connection}:
                    other.close()
                _run_worker(connection, server)
            workers[child] = connection
        waiting = []
        ended, status = os.wait()
        connection = workers.pop(ended)
        reply = _REPLY_OF_END.get(os.waitstatus_to_exitcode(status))
        try:
            if reply is not None:
                connection.sendall(reply)
                waiting = [connection]
                continue
        except OSError:  # the caller has closed it
            pass
        connection.close()


def _run_worker(connection: socket.socket, server: int) -> None:
    import ctypes
    import resource

    from rstar_lab.verify import equality, symbolic

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the server, which has one thread
    if os.getppid() != server:
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests = connection.makefile("rb", buffering=0)  # reads no further request than its own
    for _ in range(COMPARISONS_PER_WORKER):
        line = requests.readline()
        if not line:
            os._exit(0)
        candidate, answer, cpu_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        equal = reusable = True
        try:
            equal = equality.equal(candidate, answer, symbolic)
        except (RecursionError, MemoryError):
            equal, reusable = False, False
        except Exception:  # sympy raises errors of all kinds
            equal = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            connection.sendall(EQUAL if equal else DIFFERENT)
        except OSError:  # the caller has closed it
            os._exit(0)
        if not reusable:
            break
    os._exit(RENEWED)


if __name__ == "__main__":
    root = str(Path(__file__).parents[2])
    sys.path.insert(0, root)  # the package of the caller, whatever else is installed
    import rstar_lab.verify  # noqa: F401

    sys.path.remove(root)
    sys.modules["rstar_lab"].__path__ = [str(Path(__file__).parents[1])]
    run_server([socket.socket(fileno=int(number)) for number in sys.argv[1:]])
