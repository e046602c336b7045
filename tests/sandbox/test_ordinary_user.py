"""Tests of programs that use up what all programs of an ordinary user share, without control groups."""

import asyncio
import json
import os
import subprocess
import sys

import pytest
from helpers.sandbox_processes import ROOT

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Call, SandboxClient
from rstar_lab.sandbox.call import failure
from rstar_lab.sandbox.client import MOST_SANDBOX_ERRORS, Waiting
from rstar_lab.sandbox.runtime.socket_memory import SocketMemory

pytestmark = pytest.mark.slow

RUN = """
import asyncio, json, sys
from rstar_lab.sandbox import Limits, LocalSandbox
hostile, honest = json.loads(sys.argv[1])
async def main():
    async with LocalSandbox(Limits(timeout_s=3, memory_mb=256), workers=2) as sandbox:
        await sandbox.run("print(1)")
        running = asyncio.create_task(sandbox.run(hostile))
        await asyncio.wait({running}, timeout=0.7)
        results = []
        while not running.done():
            result = await sandbox.run(honest)
            results.append((result.outcome, result.stdout))
            await asyncio.sleep(0.1)
        after = await asyncio.gather(*(sandbox.run(honest) for _ in range(4)))
        results += [(result.outcome, result.stdout) for result in after]
        print(json.dumps([(await running).outcome, sorted(set(results)), sorted(sandbox.missing_layers)]))
asyncio.run(main())
"""
IN_FLIGHT = """
import os, socket, time
pairs = []
for _ in range(40):
    pairs.append(socket.socketpair())
    fds = [os.open("/dev/null", 0) for _ in range(50)]
    try: socket.send_fds(pairs[-1][0], [b"x"], fds)
    except OSError: pass
    for fd in fds: os.close(fd)
while True: time.sleep(1)
"""
PIPES = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        pipes = []
        try:
            while True: pipes.append(os.pipe())
        except OSError: pass
        while True: time.sleep(1)
while True: time.sleep(1)
"""
NESTED = """
import os, socket, time
pairs = []
for _ in range(10):
    outer, inner = socket.socketpair(), socket.socketpair()
    try:
        for _ in range(4): socket.send_fds(inner[0], [b"x"], [0] * 50)
    except OSError: break
    try: socket.send_fds(outer[0], [b"x"], [inner[0].fileno(), inner[1].fileno()])
    except OSError: break
    for end in inner: end.close()
    pairs.append(outer)
while True: time.sleep(1)
"""
SEND = """
import os, socket
reading, writing = os.pipe()
os.set_blocking(writing, False)
one, other = socket.socketpair()
socket.send_fds(one, [b"x"], [0])
print(os.write(writing, bytes(60000)))
"""
TIMERS = """
import ctypes, time
libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
while libc.timer_create(0, 0, ctypes.byref(timer)) == 0: pass
while True: time.sleep(1)
"""
SIGNALS = """
import os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, range(signal.SIGRTMIN, signal.SIGRTMAX))
import ctypes
for _ in range(200000):
    if os.fork() == 0: break
    if ctypes.CDLL(None).kill(os.getpid(), signal.SIGRTMIN + 1): break
while True: time.sleep(1)
"""
SOCKETS = """
import os, socket, time
for _ in range(8):
    if os.fork() == 0:
        pairs = []
        while len(pairs) < 200:
            pairs.append(socket.socketpair())
            pairs[-1][0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            pairs[-1][0].setblocking(False)
            try:
                while True: pairs[-1][0].send(bytes(60000))
            except BlockingIOError: pass
        while True: time.sleep(1)
while True: time.sleep(1)
"""
# Every thread has descriptors of its own, which /proc/PID/fd does not list.
THREADS = """
import ctypes, os, threading, time
def hide():
    ctypes.CDLL(None, use_errno=True).syscall(436, 900, 901, 2)
    pipes = []
    try:
        while len(pipes) < 200: pipes.append(os.pipe())
    except OSError: pass
    time.sleep(99)
for _ in range(12): threading.Thread(target=hide, daemon=True).start()
time.sleep(99)
"""
# The descriptors of a process that executes a file which it may not read are hidden.
UNREADABLE = """
import os, shutil, sys
shutil.copy(os.path.realpath(sys.executable), "python")
os.chmod("python", 0o111)
code = "import os, time\\nfor _ in range(4): os.fork()\\npipes = []\\ntry:\\n while len(pipes) < 200: pipes.append(os.pipe())\\n"
code += "except OSError: pass\\ntime.sleep(99)"
os.execve("./python", ["python", "-c", code], {**os.environ, "PYTHONHOME": sys.base_prefix})
"""
# The first thread of each process has ended, so /proc/PID/fd and /proc/PID/status have neither descriptors nor memory.
FIRST_THREAD = """
import ctypes, os, threading, time
for _ in range(4): os.fork()
def hide():
    time.sleep(0.1)
    pipes = []
    try:
        while len(pipes) < 200: pipes.append(os.pipe())
    except OSError: pass
    time.sleep(99)
threading.Thread(target=hide).start()
ctypes.CDLL(None).syscall(60, 0)
"""
FIRST_THREAD_MEMORY = """
import ctypes, threading, time
def fill():
    time.sleep(0.1)
    x = bytearray(700 << 20)
    for i in range(0, len(x), 4096): x[i] = 1
    time.sleep(99)
threading.Thread(target=fill).start()
ctypes.CDLL(None).syscall(60, 0)
"""
# Sockets that are sent through each other stay in the kernel until its garbage collection, even after the call has ended.
CYCLES = """
import socket
for _ in range(30):
    a, b = socket.socketpair()
    try:
        socket.send_fds(a, [b"x"], [a.fileno(), b.fileno()] * 3)
        socket.send_fds(b, [b"x"], [a.fileno()])
    except OSError: break
    a.close(), b.close()
"""
EPOLLS = """
import os, select, time
os.fork()
events = [os.eventfd(0) for _ in range(300)]
polls = []
while len(polls) < 200:
    polls.append(select.epoll())
    for event in events: polls[-1].register(event)
while True: time.sleep(1)
"""
ORPHANS = """
import os, time
def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end: pass
while True:
    if os.fork() == 0:
        for _ in range(2):
            if os.fork() == 0:
                spin(0.03)
                os._exit(0)
        os._exit(0)
    os.wait()
    spin(0.005)
"""
HONEST_PROGRAMS = """
import multiprocessing as mp, os, socket, subprocess
from concurrent.futures import ProcessPoolExecutor
def square(x): return x * x
if __name__ == "__main__":
    pipes = [os.pipe() for _ in range(100)]
    pairs = [socket.socketpair() for _ in range(20)]
    for one, _ in pairs: socket.send_fds(one, [b"x"], [0, 1])
    with ProcessPoolExecutor(20) as pool: print(sum(pool.map(square, range(50))))
    with mp.get_context("forkserver").Pool(2) as pool: print(sum(pool.map(square, range(10))))
    print(subprocess.run(["echo", "done"], capture_output=True, text=True).stdout)
"""
TIMER = "import ctypes\ntimer = ctypes.c_void_p()\nprint(ctypes.CDLL(None).timer_create(0, 0, ctypes.byref(timer)))"


PRINT = "print(1)"


def run_beside(as_other_user, hostile: str, honest: str) -> tuple[str, list[list[str]]]:
    """Run a hostile program and honest ones as an ordinary user; return its outcome, and theirs with their output."""
    outcome, honest_results, missing = json.loads(as_other_user(RUN, json.dumps([hostile, honest])).stdout)
    if "cgroup" not in missing:
        pytest.skip("this user has a control group")
    return outcome, honest_results


# Name: hostile program, its outcome (None: any of the program's own), honest program beside it.
NEIGHBOURS = {
    "pipes": (PIPES, "killed", SEND),
    "descriptors in flight": (IN_FLIGHT, "killed", SEND),
    "hidden descriptors in flight": (NESTED, "killed", SEND),
    "descriptors of threads": (THREADS, "timeout", SEND),
    "descriptors of an unreadable process": (UNREADABLE, "killed", SEND),
    "descriptors of a process whose first thread has ended": (FIRST_THREAD, "killed", SEND),
    "memory of a process whose first thread has ended": (FIRST_THREAD_MEMORY, "memory", SEND),
    "sockets of an earlier call": (CYCLES, None, SEND),
    "epoll watches": (EPOLLS, "killed", PRINT),
    "timers": (TIMERS, "timeout", TIMER),
    "signals": (SIGNALS, None, TIMER),
    "socket buffers": (SOCKETS, "memory", PRINT),
    # Their CPU time is unknown, so the program looks as if it got no CPU.
    "orphans": (ORPHANS, "timeout", PRINT),
}
OUTPUTS = {SEND: "60000\n", TIMER: "0\n", PRINT: "1\n"}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_do_not_notice_and_the_program_is_responsible(as_other_user, name):
    hostile, outcome, honest = NEIGHBOURS[name]
    ended, honest_results = run_beside(as_other_user, hostile, honest)
    assert ended == outcome if outcome else ended != "sandbox_error"
    assert honest_results == [["ok", OUTPUTS[honest]]]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_under_load_a_loop_is_a_timeout_and_an_honest_program_succeeds(as_other_user):
    work = "import time\nwhile time.process_time() < 0.4: pass\nprint('done')"
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(10 * (os.cpu_count() or 1))]
    try:
        outcome, honest_results = run_beside(as_other_user, "while True: pass", work)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert outcome == "timeout"
    assert honest_results == [["ok", "done\n"]]


def test_programs_with_many_processes_pipes_and_sockets_work(as_other_user):
    outcome, _ = run_beside(as_other_user, HONEST_PROGRAMS, PRINT)
    assert outcome == "ok"


def test_the_buffers_of_sockets_are_measured():
    """In a network namespace of its own, as a supervisor has."""
    code = (
        "import socket\n"
        "from rstar_lab.sandbox.runtime import kernel\nkernel.unshare(kernel.CLONE_NEWNET)\n"
        "from rstar_lab.sandbox.runtime.socket_memory import SocketMemory\n"
        "memory = SocketMemory()\nused = lambda: sum(memory.bytes_by_socket().values())\nbefore = used()\n"
        "pairs = [socket.socketpair() for _ in range(300)]\n"
        "for one, _ in pairs: one.send(bytes(50000))\n"
        "print(before, used() >= 300 * 50000)\n"
        "for one, other in pairs: one.close(); other.close()\nprint(used())"
    )
    if os.geteuid() != 0:
        pytest.skip("requires root")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["0", "True", "0"], done.stderr


def test_without_the_kernels_report_no_memory_is_counted(monkeypatch):
    monkeypatch.setattr("socket.socket", lambda *_: (_ for _ in ()).throw(OSError))
    assert SocketMemory().bytes_by_socket() == {}


async def test_a_call_that_always_fails_is_not_repeated_for_ever():
    async with SandboxClient("http://127.0.0.1:9") as client:
        waiting = Waiting(Call("x"), float("inf"), asyncio.get_running_loop().create_future())
        for _ in range(MOST_SANDBOX_ERRORS):
            assert not waiting.future.done()
            client.give(waiting, failure(Outcome.SANDBOX_ERROR, "starved"))
        assert waiting.future.result().outcome is Outcome.SANDBOX_ERROR


def test_sockets_of_a_process_that_has_just_ended_are_not_hidden(monkeypatch):
    sockets, memory = dict.fromkeys(range(10**9, 10**9 + 50), 1), SocketMemory()
    monkeypatch.setattr(memory, "bytes_by_socket", lambda: sockets)
    assert memory.exceeds_user_limits(lambda: [os.getpid()], sockets)
    monkeypatch.setattr(memory, "bytes_by_socket", dict)
    assert not memory.exceeds_user_limits(lambda: [os.getpid()], sockets)
