"""A keeper runs one call at a time: forks the program, watches it, ends all of it, answers.

It is a fork of a zygote, so its own forks start with the zygote's imports. It lives on the trusted side: programs
cannot reach it, and what it reports of time, memory and endings comes from the kernel.
"""

import contextlib
import marshal
import mmap
import os
import select
import signal
import socket
from typing import NoReturn

from rstar_lab.sandbox.box import kernel, processes, program
from rstar_lab.sandbox.box.cgroup import NORMAL, Group
from rstar_lab.sandbox.box.frames import CALL, HEAD, LONG, YIELD, Request, Result, pack_result, unpack_request
from rstar_lab.sandbox.box.isolation import Isolation, fork_into
from rstar_lab.sandbox.box.watch import LONG_CPU_S, TICK_S, Watch

ENDINGS = {
    program.DONE: "ok",
    program.RAISED: "exception",
    program.INVALID: "syntax_error",
    program.NO_MEMORY: "memory",
}
# Processes of a slot's group that are not the program's: the keeper and the namespace's init.
OWN_PROCESSES = 2
OWN_MEMORY_MB = 16
GRACE_S = 0.5
IDLE_TICK_S = 10.0
IDLE_CPU_S = 1.0


class Streams:
    """The program's standard streams: files in memory, so that nobody has to pump them while it runs."""

    def __init__(self) -> None:
        self.stdin, self.stdout, self.stderr = (os.memfd_create(name) for name in ("stdin", "stdout", "stderr"))
        self.fds = [self.stdin, self.stdout, self.stderr]

    def feed(self, stdin: bytes) -> None:
        view = memoryview(stdin)
        while view:
            view = view[os.write(self.stdin, view) :]
        os.lseek(self.stdin, 0, os.SEEK_SET)

    def rewind(self) -> None:
        """Empty them, for the next cell of a session."""
        for fd in self.fds:
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)

    def take(self, most: int) -> list[bytes]:
        return [_head(fd, most) for fd in (self.stdout, self.stderr)]

    def attach(self) -> None:
        """In the program: become its descriptors 0, 1 and 2."""
        for target, fd in enumerate(self.fds):
            os.dup2(fd, target)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def _head(fd: int, most: int) -> bytes:
    size = os.fstat(fd).st_size
    data = os.pread(fd, min(size, most), 0) if size else b""
    return data + b"\n[output cut at %d bytes]\n" % most if size > most else data


class Program:
    """A forked program with all it started."""

    def __init__(self, keeper: "Keeper", request: Request) -> None:
        self.streams = Streams()
        self.streams.feed(b"" if request.session else request.stdin)
        self.channel, self.cell = None, -1
        if request.session:
            self.channel, theirs = socket.socketpair()
            self.cell = os.memfd_create("cell")
        # The program's last sign before the user's code is a byte here; then it lets go of the page for ever.
        self._started = mmap.mmap(-1, mmap.PAGESIZE)
        self.init = kernel.new_pid_namespace() if keeper.isolation.has("pid_namespace") else 0
        self.pid = fork_into(self.init, keeper.own_pid_namespace)
        if self.pid == 0:
            try:
                self.streams.attach()
                if request.session:
                    os.dup2(theirs.fileno(), 3)
                    os.dup2(self.cell, 4)
                kernel.close_from(5 if request.session else 3)
                keeper.isolation.enter(request, keeper.number)
                self._started[0] = 1
                self._started.close()
                if request.session:
                    program.run_session(3, 4, keeper.report)
                else:
                    program.run_program(request.code, request.seed, request.value_bytes, keeper.report)
            finally:
                os._exit(70)
        if request.session:
            theirs.close()
        self.pidfd = os.pidfd_open(self.pid)
        self._isolation = keeper.isolation

    @property
    def started(self) -> bool:
        return self._started[0] == 1

    def submit(self, request: Request) -> None:
        """Hand a session its next cell."""
        assert self.channel is not None
        self.streams.rewind()
        self.streams.feed(request.stdin)
        cell = marshal.dumps((request.code, request.seed, request.value_bytes))
        os.ftruncate(self.cell, 0)
        os.pwrite(self.cell, cell, 0)
        with contextlib.suppress(OSError):
            self.channel.send(b".")

    def end(self) -> int:
        """Kill whatever still runs; return the program's wait status."""
        if self.init:
            os.kill(self.init, signal.SIGKILL)
            status = os.waitpid(self.pid, 0)[1]
            os.waitpid(self.init, 0)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            status = os.waitpid(self.pid, 0)[1]
            processes.end_all(os.getpid())
        os.close(self.pidfd)
        self._started.close()
        if self.channel is not None:
            self.channel.close()
            os.close(self.cell)
        return status


class Keeper:
    def __init__(self, sock: socket.socket, isolation: Isolation, group: Group | None, number: int) -> None:
        self.sock = sock
        self.isolation = isolation
        self.group = group
        self.number = number
        self.report = program.Report()
        self.own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        self.running: Program | None = None

    def serve(self) -> None:
        while True:
            if self.running is not None:
                self._idle()
            kind, body = self._receive()
            if kind == CALL:
                request = unpack_request(body)
                answer = self.run_cell(request) if request.session else self.run(request)
                self.sock.sendall(pack_result(answer))

    def _receive(self) -> tuple[bytes, bytes]:
        size, kind = HEAD.unpack(self._read(HEAD.size))
        return kind, self._read(size)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.sock.recv(min(size - len(data), 1 << 20))
            if not part:
                self._leave()
            data += part
        return bytes(data)

    def _leave(self) -> NoReturn:
        """Nobody waits for an answer any more."""
        if self.running is not None:
            self.running.end()
        os._exit(0)

    def run(self, request: Request) -> Result:
        """One call in a process of its own."""
        self._limit(request)
        self.report.clear()
        self.running = running = Program(self, request)
        watch = Watch(request, running.pid, self.group, running.streams.fds[1:])
        verdict, _ = self._wait(watch, running)
        duration_s = watch.wall_s()
        cpu_s = watch.cpu_s()
        started = running.started
        self.running = None
        status = running.end()
        outcome, value = self._ending(request, verdict, started, status)
        result = self._result(request, outcome, value, False, running, duration_s, cpu_s)
        running.streams.close()
        return result

    def run_cell(self, request: Request) -> Result:
        """One cell of a session; the first starts its interpreter."""
        self._limit(request)
        self.report.clear()
        if self.running is None:
            self.running = Program(self, request)
        running = self.running
        running.submit(request)
        watch = Watch(request, running.pid, self.group, running.streams.fds[1:])
        verdict, done = self._wait(watch, running)
        if verdict == "timeout":
            # An interrupt keeps the session's state, if the cell lets it through.
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGINT)
            done = self._finished(running, GRACE_S)
        duration_s, cpu_s = watch.wall_s(), watch.cpu_s()
        if done:
            ending, value = self.report.read(request.value_bytes)
            outcome = verdict or ENDINGS.get(ending, "killed")
            value = value if outcome == "ok" else None
        else:
            started = running.started
            self.running = None
            status = running.end()
            outcome, value = self._ending(request, verdict, started, status)
        return self._result(request, outcome, value, done, running, duration_s, cpu_s)

    def _limit(self, request: Request) -> None:
        if self.group:
            self.group.limit(request.memory_mb + OWN_MEMORY_MB, request.processes + OWN_PROCESSES)
            self.group.weigh(NORMAL)

    def _wait(self, watch: Watch, running: Program) -> tuple[str | None, bool]:
        """Wait until the program or its cell ends, or has to be ended: (verdict, the cell is done)."""
        poller = select.poll()
        poller.register(running.pidfd, select.POLLIN)
        poller.register(self.sock, select.POLLIN)
        if running.channel is not None:
            poller.register(running.channel, select.POLLIN)
        told = False
        tick_s = LONG_CPU_S
        while True:
            for fd, _ in poller.poll(tick_s * 1000):
                if fd == self.sock.fileno():
                    if self._receive()[0] == YIELD:
                        watch.make_room()
                elif fd == running.pidfd:
                    return None, False
                else:
                    assert running.channel is not None
                    return None, running.channel.recv(1) == b"."
            verdict = watch.verdict()
            if verdict:
                return verdict, False
            if not told and watch.long():
                told = True
                self.sock.sendall(HEAD.pack(0, LONG))
            tick_s = TICK_S

    def _finished(self, running: Program, within_s: float) -> bool:
        assert running.channel is not None
        return bool(select.select([running.channel], [], [], within_s)[0]) and running.channel.recv(1) == b"."

    def _idle(self) -> None:
        """Wait for the session's next cell; end it where it works on meanwhile."""
        if self.group:
            self.group.begin()
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        while not poller.poll(IDLE_TICK_S * 1000):
            if self.group and (self.group.cpu_s() or 0.0) > IDLE_CPU_S:
                self._leave()

    def _ending(self, request: Request, verdict: str | None, started: bool, status: int) -> tuple[str, bytes | None]:
        ending, value = self.report.read(request.value_bytes + 64)
        if not started:
            return verdict if verdict == "timeout" else "sandbox_error", None
        if verdict:
            return verdict, None
        if self.group and self.group.out_of_memory():
            return "memory", None
        if status == 0 and ending != program.NOTHING:
            return ENDINGS[ending], value if ending == program.DONE else None
        return "ok" if status == 0 else "killed", None

    def _result(
        self,
        request: Request,
        outcome: str,
        value: bytes | None,
        alive: bool,
        running: Program,
        duration_s: float,
        cpu_s: float,
    ) -> Result:
        sizes = [os.fstat(fd).st_size for fd in running.streams.fds[1:]]
        if outcome != "sandbox_error" and max(sizes) > request.output_bytes:
            outcome, value = "output_limit", None
        stdout, stderr = running.streams.take(request.output_bytes)
        return Result(outcome, alive, duration_s, cpu_s, stdout, stderr, value)


def keep(sock: socket.socket, isolation: Isolation, group: Group | None, number: int) -> None:
    """Serve calls on this socket until it closes."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    if group:
        group.join()
        with contextlib.suppress(OSError):
            kernel.unshare(kernel.CLONE_NEWCGROUP)
    # Above its programs, so that a fork bomb cannot keep it from the kill.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    if not isolation.has("pid_namespace"):
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    Keeper(sock, isolation, group, number).serve()
